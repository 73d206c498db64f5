"""Lists a study's files that its assets folder lacks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from residual_mass.inputs.assets import listed_in
from residual_mass.inputs.hub_data import HUB, REVISIONS, HubPart
from residual_mass.inputs.hub_folder import REMEDY, HubFolder, key_of
from residual_mass.prefetch.needs import same_order
from residual_mass.provenance import MANIFEST
from residual_mass.study.specs import PrefetchSpec, StreamNeed


def problems(needs: PrefetchSpec, assets: Path) -> list[str]:
    """Returns one line with everything that a folder lacks for an offline run; empty if it lacks nothing.

    Checks only existence and size; sha256 are checked when files are used.
    """
    lacking = [*_asset_problems(assets), *_hub_problems(needs, HubFolder(assets))]
    return [f"offline, and the assets folder lacks: {'; '.join(lacking)}: {REMEDY}"] if lacking else []


def _asset_problems(assets: Path) -> Iterator[str]:
    """Yields missing files of the pinned wheels, which every study needs."""
    manifest = assets / MANIFEST
    if not manifest.is_file():
        yield f"{manifest}: no such file"
        return
    yield from (f"{assets / name}: no such file" for name in listed_in(manifest) if not (assets / name).is_file())


def _hub_problems(needs: PrefetchSpec, hub: HubFolder) -> Iterator[str]:
    content = hub.content()
    for model in needs.models:
        entry = content["models"].get(model.model_id)
        if entry is None or entry["revision"] != model.revision:
            yield f"model {model.model_id} at {model.revision}"
            continue
        problems = (hub.problem("models", model.model_id, entry, name) for name in entry["files"])
        yield from filter(None, problems)
    for part in needs.parts:
        yield from _part_problems(part, hub, content)
    for need in needs.streams:
        part = HUB[need.corpus].part
        held = content["data_sets"].get(part.data_set, {"parts": {}})["parts"].get(key_of(part))
        if held is None or not covers(held, need):
            yield (
                f"corpus {need.corpus}: {need.tokens:,} tokens of it for seed {need.seed} and {need.slots} sequences "
                f"per step, as the tokenizer {need.tokenizer} counts them"
            )
        else:
            yield from _part_problems(part, hub, content)


def _part_problems(part: HubPart, hub: HubFolder, content: dict[str, Any]) -> Iterator[str]:
    entry = content["data_sets"].get(part.data_set)
    if entry is None or key_of(part) not in entry["parts"]:
        yield f"data set {part}"
    elif REVISIONS.get(part.data_set, entry["revision"]) != entry["revision"]:
        yield f"data set {part} at {REVISIONS[part.data_set]}"
    else:
        names = entry["parts"][key_of(part)]["files"].values()
        yield from filter(None, (hub.problem("data_sets", part.data_set, entry, name) for name in names))


def covers(held: dict[str, Any], need: StreamNeed) -> bool:
    """Whether the fetched part of a corpus covers what a training reads."""
    alike = [one["tokens"] for one in held.get("streams", []) if same_order(one) == same_order(asdict(need))]
    return max(alike, default=0) >= need.tokens
