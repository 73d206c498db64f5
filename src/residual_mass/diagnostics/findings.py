"""Captured rows summed up: means with intervals, and which of the paper's statements about its diagnostics hold.

Intervals come from a two-way bootstrap over heads and packs, see `resampling`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from residual_mass import statements
from residual_mass.diagnostics import CWE
from residual_mass.diagnostics.claims import CLAIMS, JOINT_CLAIMS, Claim
from residual_mass.diagnostics.resampling import (
    BootstrapEstimate,
    CapturedSetting,
    Sample,
    estimate,
    estimate_extreme,
    resampled,
    whole,
)
from residual_mass.files import csv_text, write_text
from residual_mass.provenance import Record
from residual_mass.study.specs import FindingsSpec

ACCOUNTING = (
    "study backbone corpus length maps budget_percent k e_topk e_topk_ci_low e_topk_ci_high e_nosub e_nosub_ci_low "
    "e_nosub_ci_high e_sub e_sub_ci_low e_sub_ci_high e_exact_sub e_exact_nosub log_z_error log_z_error_ci_low "
    "log_z_error_ci_high clamped_share packs heads rows model_id revision weights phi_sha"
).split()
PROVENANCE = ("study", "backbone", "maps", "model_id", "revision", "weights", "phi_sha")
HEADS_ORDER = ["budget_percent", "layer", "head", "pack", "query"]
MASS_ORDER = ["k", "layer", "head", "pack"]
MEANS = "e_topk e_sub e_nosub e_exact_sub e_exact_nosub residual_share_hat h_mid clamped".split()
LOGARITHMS = ("log_z_hat", "log_z_true")
QUARTILES = 4
ALL = "all"
DECIMALS = "z.6f"


def run(spec: FindingsSpec, heads: Sequence[Path], mass: Sequence[Path], accounting: Path, claims: Path) -> None:
    """The `findings` stage: two CSV files about one backbone.

    `clamped_share` is the share of rows whose residual was dropped.

    Args:
        heads, mass: captured rows and mass curves of every setting, in the same order.

    Writes:
        accounting: one row per (setting, budget).
        claims: one row per (setting, claim), then one per claim about all settings, whose `packs` are the fewest of
            any setting.
    """
    record = Record("findings", spec, [*heads, *mass])
    settings = read_settings(heads, mass)
    as_is = whole(settings, spec.budget_percent)
    drawn = resampled(settings, spec.budget_percent, spec.bootstrap_resamples, spec.seed)
    pairs = list(zip(as_is, drawn, strict=True))
    texts = {
        accounting: csv_text(ACCOUNTING, [row for pair in pairs for row in _accounting_rows(*pair)]),
        claims: csv_text(statements.COLUMNS, list(_claim_rows(spec, as_is, drawn))),
    }
    for path, text in texts.items():
        write_text(path, text)
        record.write(path)


def read_settings(heads: Sequence[Path], mass: Sequence[Path]) -> list[CapturedSetting]:
    """Reads captured rows and mass curves: one setting per pair of files, in their order.

    Raises:
        ValueError: a backbone has too few heads for quartiles.
    """
    return [_read_setting(*pair) for pair in zip(heads, mass, strict=True)]


def _read_setting(heads_file: Path, mass_file: Path) -> CapturedSetting:
    names = [*PROVENANCE, "corpus", "length", "k", *HEADS_ORDER, *MEANS, *LOGARITHMS]
    frame = pd.read_parquet(heads_file, columns=names).sort_values(HEADS_ORDER)
    packs = tuple(int(pack) for pack in frame["pack"].unique())
    pairs = frame[["layer", "head"]].drop_duplicates()
    heads = tuple((int(layer), int(head)) for layer, head in pairs.itertuples(index=False))
    # The column of budgets is in single precision, where 0.3 is not 0.3.
    ks = {float(f"{budget:g}"): int(k) for budget, k in frame.groupby("budget_percent")["k"].first().items()}
    if len(heads) < QUARTILES:
        raise ValueError(
            f"{heads_file}: quartiles need {QUARTILES} heads, the backbone has {len(heads)}; leave it out of findings"
        )
    shape = (len(ks), len(heads), len(packs), -1)
    rows = {name: frame[name].to_numpy(np.float64).reshape(shape) for name in (*MEANS, *LOGARITHMS)}
    cells = {budget: _cells({name: values[b] for name, values in rows.items()}) for b, budget in enumerate(ks)}
    curves = pd.read_parquet(mass_file, columns=[*MASS_ORDER, "c_mid"]).sort_values(MASS_ORDER)
    grid = [int(k) for k in curves["k"].unique()]
    recovered = curves["c_mid"].to_numpy(np.float64).reshape(len(grid), len(heads), len(packs))
    return CapturedSetting(
        facts={name: str(frame[name].iloc[0]) for name in (*PROVENANCE, "corpus", "length")},
        heads=heads,
        packs=packs,
        ks=ks,
        cells=cells,
        mass=dict(zip(grid, recovered, strict=True)),
        rows=len(frame) // len(ks),
        quartiles=_quartiles(cells[next(iter(ks))]["h_mid"]),
    )


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


def _accounting_rows(as_is: Sample, drawn: Sample) -> Iterator[dict[str, object]]:
    setting = as_is.setting
    for budget, k in setting.ks.items():
        row: dict[str, object] = {**setting.facts, "budget_percent": f"{budget:g}", "k": k}
        for name in ("e_topk", "e_nosub", "e_sub"):
            row |= _with_interval(name, estimate(Sample.mean, as_is, drawn, name, budget))
        row |= _with_interval("log_z_error", estimate(Sample.log_z_error, as_is, drawn, budget))
        row["e_exact_sub"] = f"{as_is.mean('e_exact_sub', budget)[0]:.3e}"
        row["e_exact_nosub"] = _text(as_is.mean("e_exact_nosub", budget)[0])
        row["clamped_share"] = _text(as_is.mean("clamped", budget)[0])
        yield row | {"packs": len(setting.packs), "heads": len(setting.heads), "rows": setting.rows}


def _claim_rows(spec: FindingsSpec, as_is: Sequence[Sample], drawn: Sequence[Sample]) -> Iterator[dict[str, object]]:
    for one, of_draws in zip(as_is, drawn, strict=True):
        for claim in CLAIMS:
            setting = one.setting
            if claim.applies(setting):
                made_at = f"{CWE if claim.about == CWE else spec.corpus} {spec.length}"
                row = _claim_row(claim, one, of_draws, [one]) | {"primary": int(setting.name == made_at)}
                yield row | ({"k": setting.ks[spec.budget_percent]} if claim.one_budget else {})
    for joint in JOINT_CLAIMS:
        row = _claim_row(joint, as_is, drawn, as_is)
        yield row | {"corpus": ALL, "length": ALL, "primary": 1}


def _claim_row(claim: Claim, as_is: Any, drawn: Any, samples: Sequence[Sample]) -> dict[str, object]:
    """samples: those that `as_is` consists of."""
    settings = [sample.setting for sample in samples]
    if claim.extreme is None:
        found = estimate(claim.number, as_is, drawn)
    else:
        found = estimate_extreme(claim.number, as_is, drawn, claim.extreme)
    numbers = [_text(value, claim.decimals) for value in found]
    return {
        **{name: settings[0].facts[name] for name in statements.COLUMNS if name in settings[0].facts},
        "claim": claim.name,
        "statement": claim.statement,
        "shown_in": claim.shown_in,
        "statistic": claim.statistic,
        **dict(zip(("estimate", "ci_low", "ci_high"), numbers, strict=True)),
        "verdict": statements.verdict(*numbers[1:]),
        "clamped_share": _text(_clamped_share(claim, samples)),
        "packs": min(len(setting.packs) for setting in settings),
        "heads": len(settings[0].heads),
    }


def _clamped_share(claim: Claim, samples: Sequence[Sample]) -> float:
    budgets = [[sample.budget] if claim.one_budget else list(sample.setting.ks) for sample in samples]
    shares = [sample.mean("clamped", b)[0] for sample, of in zip(samples, budgets, strict=True) for b in of]
    return float(np.mean(shares))


def _with_interval(name: str, numbers: BootstrapEstimate) -> dict[str, object]:
    texts = (_text(number) for number in numbers)
    return dict(zip((name, f"{name}_ci_low", f"{name}_ci_high"), texts, strict=True))


def _text(value: float, decimals: str = DECIMALS) -> str:
    """Empty where the value is not defined."""
    return "" if np.isnan(value) else format(value, decimals)
