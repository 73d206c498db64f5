"""The protocol behind the paper's values, by key of the configuration, with open points resolved as in
docs/deviations.md. Values from another protocol are not comparable with the paper's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_AS_THE_HARNESS = {"chat_template": False, "answer_margin": None, "truncate_to": "64k"}
DECODING: dict[str, dict[str, Any]] = {
    "ruler": _AS_THE_HARNESS | {"budget_length": "nominal"},
    "babilong": _AS_THE_HARNESS | {"budget_length": "nominal"},
    "longbench": _AS_THE_HARNESS | {"budget_length": "real"},
}
"""Decoding settings behind a benchmark's scores; a study's own are recorded in its score files."""
PROTOCOL: dict[str, Any] = {
    "backbones.1b.dtype": "bfloat16",
    "backbones.3b.dtype": "bfloat16",
    "anchors.sink": 4,
    "anchors.tail": 16,
    "phi.corpora": ["fineweb", "arxiv", "bigpatent"],
    "phi.steps": 200_000,
    "phi.learning_rate": 1e-3,
    "phi.weight_decay": 1e-4,
    "phi.schedule": "constant",
    "phi.warmup_steps": 0,
    "phi.sequences_per_step": 1,
    "phi.queries_per_step": 100,
    "phi.query_window": 0.50354,
    "phi.map.kind": "rezero",
    "phi.map.d_emb": 512,
    "phi.map.d_phi": 64,
    "phi.map.init": "default",
    "phi.objective.name": "ours",
    "phi.objective.tau": 10,
    "phi.objective.lambda_kl": 0.99,
    "phi.objective.lambda_top": 1,
    "phi.objective.lambda_fp": 2,
    "phi.objective.lambda_z": 4,
    "phi.objective.band": 12,
    "phi.objective.huber_delta": 1,
    "phi.replay.pool": 1,
    "phi.replay.reuse": 1,
    "phi.curriculum": None,
}
"""Other settings that values depend on; a study's own are in the spec of the comparison."""
VARIANTS: dict[str, dict[str, Any]] = {
    "dphi_32": {"phi.map.d_phi": 32},
    "dphi_128": {"phi.map.d_phi": 128},
    "hedgehog_map": {"phi.map.kind": "hedgehog"},
    "lolcats_loss": {"phi.objective.name": "lolcats"},
    "kl_only": {"phi.objective.name": "kl"},
    "aux_only": {"phi.objective.name": "aux"},
}
"""Changes to PROTOCOL in the paper's ablations, by variant."""


def settings_of(configuration: Mapping[str, Any]) -> dict[str, str]:
    """Returns the settings in PROTOCOL that a nested configuration has, as text."""
    found = {key: _at(configuration, key.split(".")) for key in PROTOCOL}
    return {key: text_of(value) for key, value in found.items() if value is not ...}


def text_of(value: Any) -> str:
    """Formats a setting, with the same text for 1 and 1.0."""
    whole = isinstance(value, float) and value.is_integer()
    return value if isinstance(value, str) else json.dumps(int(value) if whole else value, sort_keys=True)


def _at(configuration: Any, path: list[str]) -> Any:
    """Returns the value at a path of keys, or an ellipsis if there is none."""
    for name in path:
        if not isinstance(configuration, Mapping) or name not in configuration:
            return ...
        configuration = configuration[name]
    return configuration
