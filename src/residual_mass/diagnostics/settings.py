"""Captured rows, read back as means over queries: for every (corpus, length), cells of (head, pack).

Shape letters: H = heads, that is (layer, query head), P = packs, Q = queries per pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from residual_mass.study.specs import FindingsSpec

PROVENANCE = ("study", "backbone", "maps", "model_id", "revision", "weights", "phi_sha")
PLACE = ("backbone", "corpus", "length")
HEADS_ORDER = ["budget_percent", "layer", "head", "pack", "query"]
MASS_ORDER = ["k", "layer", "head", "pack"]
MEANS = "e_topk e_sub e_nosub e_exact_sub e_exact_nosub residual_share_hat h_mid clamped".split()
LOGARITHMS = ("log_z_hat", "log_z_true")
QUARTILES = 4


@dataclass(frozen=True)
class CapturedSetting:
    """What was captured on one corpus at one length.

    Attributes:
        facts: `PROVENANCE`, corpus and length.
        ks: K of every budget, in ascending order of budgets.
        cells: by budget, then by name, [H, P]: means over queries of `MEANS`, of gain = e_topk - e_sub and delta =
            e_sub - e_nosub, and sum and count of the defined log-Z errors (log_z_sum, log_z_count). Heads are ordered
            by layer, then head.
        mass: by K of the grid, [H, P]: the mean share of the mid-region's mass that K tokens hold.
        rows: captured rows at each budget.
        quartiles: heads in four groups of ascending mean h_mid, whose sizes differ by one at most; ties keep the order
            of heads.
    """

    facts: dict[str, str]
    heads: tuple[tuple[int, int], ...]
    packs: tuple[int, ...]
    ks: dict[float, int]
    cells: dict[float, dict[str, np.ndarray]]
    mass: dict[int, np.ndarray]
    rows: int
    quartiles: tuple[np.ndarray, ...]

    @property
    def name(self) -> str:
        return f"{self.facts['corpus']} {self.facts['length']}"


def read_settings(spec: FindingsSpec, heads: Sequence[Path], mass: Sequence[Path]) -> list[CapturedSetting]:
    """One setting per pair of files, in their order.

    Raises:
        ValueError: the files do not belong together, or lack what `spec` asks for; names file and remedy.
    """
    if len(heads) != len(mass):
        raise ValueError(f"--heads has {len(heads)} files, but --mass {len(mass)}; give one mass file per heads file")
    settings = [_read_setting(*pair) for pair in zip(heads, mass, strict=True)]
    for path, setting in zip(heads, settings, strict=True):
        _check_spec(path, setting, spec)
        for name in PROVENANCE:
            if setting.facts[name] != settings[0].facts[name]:
                raise ValueError(
                    f"{path}: {name} is {setting.facts[name]}, but {settings[0].facts[name]} in {heads[0]}; give files "
                    "of one backbone and one set of maps"
                )
    if f"{spec.corpus} {spec.length}" not in [setting.name for setting in settings]:
        raise ValueError(
            f"--heads has no file of {spec.corpus} at {spec.length}, where the figures make their statements; add it"
        )
    return settings


def _read_setting(heads_file: Path, mass_file: Path) -> CapturedSetting:
    names = [*PROVENANCE, "corpus", "length", "k", *HEADS_ORDER, *MEANS, *LOGARITHMS]
    frame = pd.read_parquet(heads_file, columns=names).sort_values(HEADS_ORDER)
    packs = tuple(int(pack) for pack in frame["pack"].unique())
    pairs = frame[["layer", "head"]].drop_duplicates()
    heads = tuple((int(layer), int(head)) for layer, head in pairs.itertuples(index=False))
    # The column of budgets is in single precision, where 0.3 is not 0.3.
    ks = {float(f"{budget:g}"): int(k) for budget, k in frame.groupby("budget_percent")["k"].first().items()}
    shape = (len(ks), len(heads), len(packs), -1)
    rows = {name: frame[name].to_numpy(np.float64).reshape(shape) for name in (*MEANS, *LOGARITHMS)}
    cells = {budget: _cells({name: values[b] for name, values in rows.items()}) for b, budget in enumerate(ks)}
    return CapturedSetting(
        facts={name: str(frame[name].iloc[0]) for name in (*PROVENANCE, "corpus", "length")},
        heads=heads,
        packs=packs,
        ks=ks,
        cells=cells,
        mass=_read_mass(mass_file, heads_file, frame, (len(heads), len(packs))),
        rows=len(frame) // len(ks),
        quartiles=_quartiles(cells[next(iter(ks))]["h_mid"]),
    )


def _read_mass(path: Path, heads_file: Path, heads: pd.DataFrame, shape: tuple[int, int]) -> dict[int, np.ndarray]:
    """Mean mass recovery by K, each of `shape` [H, P]; `heads` are the rows of `heads_file`."""
    frame = pd.read_parquet(path, columns=[*PLACE, *MASS_ORDER, "c_mid"]).sort_values(MASS_ORDER)
    for name in PLACE:
        if frame[name].iloc[0] != heads[name].iloc[0]:
            raise ValueError(
                f"{path}: {name} is {frame[name].iloc[0]}, but {heads[name].iloc[0]} in {heads_file}; give mass files "
                "in the order of the heads files"
            )
    ks = [int(k) for k in frame["k"].unique()]
    return dict(zip(ks, frame["c_mid"].to_numpy(np.float64).reshape(len(ks), *shape), strict=True))


def _quartiles(entropies: np.ndarray) -> tuple[np.ndarray, ...]:
    """Heads by their mean over packs of [H, P]."""
    # Rounded, since the order of summation sets equal heads apart.
    order = np.argsort(entropies.mean(axis=1).round(12), kind="stable")
    quartile = np.arange(len(order)) * QUARTILES // len(order)
    return tuple(order[quartile == q] for q in range(QUARTILES))


def _cells(rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """[H, P] of rows [H, P, Q] at one budget; see `CapturedSetting`."""
    cells = {name: rows[name].mean(axis=-1) for name in MEANS}
    cells["gain"] = (rows["e_topk"] - rows["e_sub"]).mean(axis=-1)
    cells["delta"] = (rows["e_sub"] - rows["e_nosub"]).mean(axis=-1)
    defined = np.isfinite(rows["log_z_hat"]) & np.isfinite(rows["log_z_true"])
    errors = np.subtract(rows["log_z_hat"], rows["log_z_true"], where=defined, out=np.zeros_like(rows["log_z_hat"]))
    cells["log_z_sum"] = errors.sum(axis=-1)
    cells["log_z_count"] = defined.sum(axis=-1).astype(np.float64)
    return cells


def _check_spec(path: Path, setting: CapturedSetting, spec: FindingsSpec) -> None:
    if spec.budget_percent not in setting.ks:
        known = ", ".join(f"{budget:g}" for budget in setting.ks)
        raise ValueError(
            f"{path}: budget_percent {spec.budget_percent:g} (spec.budget_percent) is not among {known}; name one of "
            "these, or run the capture stage with it"
        )
    if len(setting.heads) < QUARTILES:
        raise ValueError(
            f"{path}: quartiles need {QUARTILES} heads, the backbone has {len(setting.heads)}; leave it out of findings"
        )
