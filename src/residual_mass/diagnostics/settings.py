"""Captured rows read back: for every (corpus, length), means over queries in cells of (head, pack).

Shape letters: H = heads, that is (layer, query head), P = packs, Q = queries per pack.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from residual_mass.files import read_parquet
from residual_mass.study.specs import FindingsSpec

PROVENANCE = ("study", "backbone", "maps", "model_id", "revision", "weights", "phi_sha")
HEADS_ORDER = ["budget_percent", "layer", "head", "pack", "query"]
MASS_ORDER = ["k", "layer", "head", "pack"]
MEANS = (
    "e_topk e_sub e_nosub e_exact_sub e_exact_nosub residual_share_hat h_mid clamped e_sub_bf16 e_nosub_bf16 "
    "clamped_bf16"
).split()
LOGARITHMS = ("log_z_hat", "log_z_true", "log_z_hat_bf16")
QUARTILES = 4
AGAIN = "delete it and run the capture stage again"


@dataclass(frozen=True)
class Setting:
    """What was captured on one corpus at one length.

    Attributes:
        facts: `PROVENANCE`, corpus and length.
        ks: K of every budget, from the smallest budget on.
        cells: by budget, then by name, [H, P]: means over queries of `MEANS`, of gain = e_topk - e_sub and delta =
            e_sub - e_nosub, and sum and count of the log-Z errors that are defined (log_z_sum, log_z_count); delta,
            log_z_sum and log_z_count also under bfloat16 summaries (delta_bf16, ...), and of what these change in
            log_z_hat where both are defined (log_z_sum_change, ...). Heads go by layer, then head.
        mass: by K of the grid, [H, P]: the mean share of the mid-region's mass that K tokens hold.
        rows: captured rows at each budget.
        quartiles: heads in four groups from low to high mean h_mid, whose sizes differ by one at most; of equal means
            the first goes to the lower group.
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


def read_settings(spec: FindingsSpec, heads: Sequence[Path], mass: Sequence[Path]) -> list[Setting]:
    """One setting per pair of files, in their order.

    Raises:
        ValueError: a file is missing, damaged or incomplete, holds a value that is not finite where it must be, or does
            not fit the others or `spec`; names file, key and remedy.
    """
    if len(heads) != len(mass):
        raise ValueError(f"--heads has {len(heads)} files, but --mass {len(mass)}; give one mass file per heads file")
    settings: list[Setting] = []
    for path, of_mass in zip(heads, mass, strict=True):
        setting = _read_setting(path, of_mass)
        _check_spec(path, setting, spec)
        _check_others(path, setting, dict(zip(heads, settings, strict=False)))
        settings.append(setting)
    if not any(setting.name == f"{spec.corpus} {spec.length}" for setting in settings):
        raise ValueError(
            f"no file of --heads is of {spec.corpus} at {spec.length} (spec.corpus, spec.length), where the figures "
            "make their statements; give it too"
        )
    return settings


def _read_setting(path: Path, mass: Path) -> Setting:
    frame = read_parquet(path, [*PROVENANCE, "corpus", "length", "k", *HEADS_ORDER, *MEANS, *LOGARITHMS], "capture")
    facts = {name: _only(path, frame, name) for name in (*PROVENANCE, "corpus", "length")}
    _check_numbers(path, frame)
    frame = _sorted(path, frame, HEADS_ORDER)
    packs = tuple(int(pack) for pack in frame["pack"].unique())
    ks = {}
    for budget, of_budget in frame.groupby("budget_percent"):
        if of_budget["k"].nunique() > 1:
            raise ValueError(f"{path}: k has several values at budget_percent {budget:g}; {AGAIN}")
        ks[float(f"{budget:g}")] = int(of_budget["k"].iloc[0])  # a column in single precision holds 0.3 inexactly
    heads = _heads(frame)
    shape = (len(ks), len(heads), len(packs), -1)
    rows = {name: frame[name].to_numpy(np.float64).reshape(shape) for name in (*MEANS, *LOGARITHMS)}
    cells = {budget: _cells({name: values[b] for name, values in rows.items()}) for b, budget in enumerate(ks)}
    # Rounded, since equal heads are apart by the order of summation.
    order = np.argsort(cells[next(iter(ks))]["h_mid"].mean(axis=1).round(12), kind="stable")
    quartile = np.arange(len(heads)) * QUARTILES // len(heads)
    return Setting(
        facts=facts,
        heads=heads,
        packs=packs,
        ks=ks,
        cells=cells,
        mass=_read_mass(mass, path, facts, heads, packs),
        rows=len(frame) // len(ks),
        quartiles=tuple(order[quartile == q] for q in range(QUARTILES)),
    )


def _read_mass(
    path: Path, of: Path, facts: dict[str, str], heads: Sequence[tuple[int, int]], packs: Sequence[int]
) -> dict[int, np.ndarray]:
    """Mean mass recovery by K, [H, P]; `facts`, `heads` and `packs` are those of the heads file `of`."""
    frame = read_parquet(path, ["backbone", "corpus", "length", *MASS_ORDER, "c_mid"], "capture")
    for name in ("backbone", "corpus", "length"):
        if (value := _only(path, frame, name)) != facts[name]:
            raise ValueError(
                f"{path}: {name} is {value}, but {facts[name]} in {of}; give mass files in the order of the heads files"
            )
    _check_finite(path, frame, [*MASS_ORDER, "c_mid"])
    frame = _sorted(path, frame, MASS_ORDER)
    if _heads(frame) != heads or tuple(frame["pack"].unique()) != packs:
        raise ValueError(f"{path}: packs, layers or heads are not those of {of}; delete both and run the capture stage")
    ks = [int(k) for k in frame["k"].unique()]
    values = frame["c_mid"].to_numpy(np.float64).reshape(len(ks), len(heads), len(packs))
    return dict(zip(ks, values, strict=True))


def _only(path: Path, frame: pd.DataFrame, name: str) -> str:
    values = frame[name].unique()
    if len(values) != 1 or pd.isna(values[0]):
        raise ValueError(f"{path}: {name} has {len(values)} values, but must name one; {AGAIN}")
    return str(values[0])


def _check_numbers(path: Path, frame: pd.DataFrame) -> None:
    if frame["h_mid"].isna().any():
        raise ValueError(f"{path}: h_mid is undefined, as with fewer than two mid-region tokens; capture longer texts")
    _check_finite(path, frame, ["k", *HEADS_ORDER, *MEANS])
    for name in LOGARITHMS:
        values = pd.to_numeric(frame[name], errors="coerce").to_numpy(np.float64)
        if not (values < np.inf).all():
            raise ValueError(f"{path}: {name} holds values that are neither finite nor -inf; {AGAIN}")


def _check_finite(path: Path, frame: pd.DataFrame, names: Sequence[str]) -> None:
    for name in names:
        if not np.isfinite(pd.to_numeric(frame[name], errors="coerce").to_numpy(np.float64)).all():
            raise ValueError(f"{path}: {name} holds values that are not finite; {AGAIN}")


def _sorted(path: Path, frame: pd.DataFrame, order: list[str]) -> pd.DataFrame:
    """Rows in this order, which must hold each combination of the values of these columns exactly once."""
    if frame.duplicated(order).any() or len(frame) != math.prod(frame[name].nunique() for name in order):
        raise ValueError(f"{path}: rows are missing or doubled among combinations of {', '.join(order)}; {AGAIN}")
    return frame.sort_values(order)


def _heads(frame: pd.DataFrame) -> tuple[tuple[int, int], ...]:
    """(layer, head) pairs of sorted rows."""
    pairs = frame[["layer", "head"]].drop_duplicates()
    return tuple((int(layer), int(head)) for layer, head in pairs.itertuples(index=False))


def _cells(rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """[H, P] of rows [H, P, Q] at one budget; see `Setting`."""
    cells = {name: rows[name].mean(axis=-1) for name in MEANS}
    cells["gain"] = (rows["e_topk"] - rows["e_sub"]).mean(axis=-1)
    for dtype in ("", "_bf16"):
        cells[f"delta{dtype}"] = (rows[f"e_sub{dtype}"] - rows[f"e_nosub{dtype}"]).mean(axis=-1)
        estimate, true = rows[f"log_z_hat{dtype}"], rows["log_z_true"]
        defined = np.isfinite(estimate) & np.isfinite(true)
        errors = np.subtract(estimate, true, where=defined, out=np.zeros_like(true))
        cells[f"log_z_sum{dtype}"] = errors.sum(axis=-1)
        cells[f"log_z_count{dtype}"] = defined.sum(axis=-1).astype(np.float64)
    rounded, estimate = rows["log_z_hat_bf16"], rows["log_z_hat"]
    defined = np.isfinite(rounded) & np.isfinite(estimate)
    changes = np.subtract(rounded, estimate, where=defined, out=np.zeros_like(estimate))
    cells["log_z_sum_change"] = changes.sum(axis=-1)
    cells["log_z_count_change"] = defined.sum(axis=-1).astype(np.float64)
    return cells


def _check_spec(path: Path, setting: Setting, spec: FindingsSpec) -> None:
    if setting.facts["study"] != spec.study:
        raise ValueError(
            f"{path}: study is {setting.facts['study']}, but spec.study {spec.study}; give files of one study"
        )
    if spec.budget_percent not in setting.ks:
        known = ", ".join(f"{budget:g}" for budget in setting.ks)
        raise ValueError(
            f"{path}: budget_percent {spec.budget_percent:g} (spec.budget_percent) is not among {known}; name one of "
            "these, or run the capture stage with it"
        )
    if len(setting.heads) < QUARTILES:
        raise ValueError(
            f"{path}: layer and head make {len(setting.heads)} heads, but quartiles need {QUARTILES}; leave findings "
            "of so small a backbone out"
        )


def _check_others(path: Path, setting: Setting, others: dict[Path, Setting]) -> None:
    """Refuses a second file of a setting, and files of another backbone or other maps."""
    for other_path, other in others.items():
        if setting.name == other.name:
            raise ValueError(f"{path}: corpus and length are {setting.name}, as in {other_path}; give one file of each")
        for name in PROVENANCE:
            if setting.facts[name] != other.facts[name]:
                raise ValueError(
                    f"{path}: {name} is {setting.facts[name]}, but {other.facts[name]} in {other_path}; give files of "
                    "one backbone and one set of maps, or run the capture stage again for both"
                )
        if setting.heads != other.heads:
            raise ValueError(f"{path}: layers or heads are not those of {other_path}; run the capture stage for both")
