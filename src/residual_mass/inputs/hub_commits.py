"""Which commit of a data set on the hub a process reads, for its reader and for the record of the result."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache

from residual_mass.inputs.hub_data import REVISIONS
from residual_mass.inputs.hub_folder import HubFolder

log = logging.getLogger(__name__)


def commits_of(data_sets: Iterable[str], hub: HubFolder | None) -> dict[str, str | None]:
    """By data set, what `commit_of` says."""
    return {data_set: commit_of(data_set, hub) for data_set in dict.fromkeys(data_sets)}


def commit_of(data_set: str, hub: HubFolder | None) -> str | None:
    """The commit that was prefetched, or is pinned, or was the newest when this process first asked; None where nobody
    tells: without network, as when the library reads a copy in its own cache.
    """
    if hub is not None and (entry := hub.content()["data_sets"].get(data_set)) is not None:
        return entry["commit"]
    return REVISIONS.get(data_set) or newest(data_set)


@cache
def newest(data_set: str) -> str | None:
    """What the hub says, asked once."""
    from huggingface_hub import HfApi

    try:
        return HfApi().dataset_info(data_set, timeout=10).sha
    except Exception as error:  # the clients of the library's versions raise unrelated classes
        log.warning("data set %s: the hub does not tell its commit (%s)", data_set, type(error).__name__)
        return None
