"""Commits of data sets on the hub, for their readers and for records."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache

from residual_mass.inputs.hub_data import REVISIONS
from residual_mass.inputs.hub_folder import HubFolder

log = logging.getLogger(__name__)


def commits_of(data_sets: Iterable[str], hub: HubFolder | None) -> dict[str, str | None]:
    """`commit_of` each data set."""
    return {data_set: commit_of(data_set, hub) for data_set in dict.fromkeys(data_sets)}


def commit_of(data_set: str, hub: HubFolder | None) -> str | None:
    """The prefetched commit, else the pinned one, else the newest at this process's first request; None where the hub
    cannot be reached and the library reads its own cache.
    """
    if hub is not None and (entry := hub.content()["data_sets"].get(data_set)) is not None:
        return entry["commit"]
    return REVISIONS.get(data_set) or newest(data_set)


@cache
def newest(data_set: str) -> str | None:
    """The newest commit on the hub, requested once."""
    from huggingface_hub import HfApi

    try:
        return HfApi().dataset_info(data_set, timeout=10).sha
    except Exception as error:  # clients of different versions raise unrelated classes
        log.warning("data set %s: its commit cannot be read from the hub (%s)", data_set, type(error).__name__)
        return None
