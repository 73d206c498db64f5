"""The `prefetch` stage: fetches what the jobs of a study read from the hub, or says what an offline run lacks."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from residual_mass.spec.paths import MANIFEST
from residual_mass.spec.settings import tokens_of
from residual_mass.spec.specs import read_jobs
from residual_mass.spec.tasks import parts_of
from residual_mass.spec.texts import HUB, HubPart
from residual_mass.texts import hub
from residual_mass.texts.assets import listed_in, require_whole


def run(jobs: Path, assets: Path) -> None:
    """Fetches what jobs read from the hub, and checks the assets folder. `study.start` writes the file `jobs`.

    Raises:
        ValueError: something cannot be fetched, or the assets folder is damaged; offline, something is missing.
    """
    hub.prefetch(*hub_needs(job.spec for job in read_jobs(jobs)))
    require_whole(assets)


def missing(specs: Iterable[dict[str, Any]], assets: Path) -> list[str]:
    """Returns what jobs lack for a run without network, one line each. Hashes are compared when files are used."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # the hub's libraries read it on import, which happens below
    listed = listed_in(assets / MANIFEST) or {MANIFEST: ""}
    absent = [assets / name for name in listed if not (assets / name).is_file()]
    lacking = ", ".join(map(str, absent))
    found = [f"offline, and the assets folder lacks {lacking}; copy it from a machine with network"] if lacking else []
    try:
        hub.prefetch(*hub_needs(specs))
    except ValueError as error:
        found.append(str(error))
    return found


def hub_needs(specs: Iterable[dict[str, Any]]) -> tuple[list[hub.Model], list[HubPart]]:
    """Returns the models and the parts of data sets that jobs read from the hub, each once.

    Args:
        specs: specs of the jobs as parsed JSON; specs of other stages add nothing.
    """
    models: list[hub.Model] = []
    parts: list[HubPart] = []
    for spec in specs:
        backbone = spec.get("backbone")
        if isinstance(backbone, dict) and backbone["source"] in ("hub", "gguf"):
            models.append((backbone["model_id"], backbone["revision"]))
        if spec.get("tokenizer_source") in ("hub", "gguf"):
            models.append((spec["model_id"], spec["revision"]))
        if "tokenizer_source" in spec and spec["data_source"] == "hub":
            parts += parts_of(spec["benchmark"], tokens_of(spec["length"])).values()
        corpora = [*spec.get("corpora", []), *spec.get("held_out", [])]
        corpora += [spec["corpus"]] if backbone and "corpus" in spec else []
        parts += [HUB[name] for name in corpora if name in HUB]
    return list(dict.fromkeys(models)), list(dict.fromkeys(parts))
