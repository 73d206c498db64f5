"""Captured rows summed up: means with intervals, and which of the paper's statements about its diagnostics hold.

Intervals come from a two-way bootstrap over heads and packs, see `resampling`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from residual_mass import statements
from residual_mass.diagnostics import CWE, columns
from residual_mass.diagnostics.claims import CLAIMS, JOINT_CLAIMS, Claim
from residual_mass.diagnostics.resampling import (
    BootstrapEstimate,
    Sample,
    Samples,
    estimate,
    estimate_extreme,
    resampled,
    whole,
)
from residual_mass.diagnostics.settings import read_settings
from residual_mass.files import csv_text, write_text
from residual_mass.provenance import Record
from residual_mass.study.specs import FindingsSpec

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
    settings = read_settings(spec, heads, mass)
    as_is = whole(settings, spec.budget_percent)
    drawn = resampled(settings, spec.budget_percent, spec.bootstrap_resamples, spec.seed)
    pairs = list(zip(as_is, drawn, strict=True))
    texts = {
        accounting: csv_text(columns.ACCOUNTING, [row for pair in pairs for row in _accounting_rows(*pair)]),
        claims: csv_text(statements.COLUMNS, list(_claim_rows(spec, as_is, drawn))),
    }
    for path, text in texts.items():
        write_text(path, text)
        record.write(path)


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


def _claim_row(claim: Claim[Samples], as_is: Samples, drawn: Samples, samples: Sequence[Sample]) -> dict[str, object]:
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


def _clamped_share(claim: Claim[Samples], samples: Sequence[Sample]) -> float:
    budgets = [[sample.budget] if claim.one_budget else list(sample.setting.ks) for sample in samples]
    shares = [sample.mean("clamped", b)[0] for sample, of in zip(samples, budgets, strict=True) for b in of]
    return float(np.mean(shares))


def _with_interval(name: str, numbers: BootstrapEstimate) -> dict[str, object]:
    texts = (_text(number) for number in numbers)
    return dict(zip((name, f"{name}_ci_low", f"{name}_ci_high"), texts, strict=True))


def _text(value: float, decimals: str = DECIMALS) -> str:
    """Empty where the value is not defined."""
    return "" if np.isnan(value) else format(value, decimals)
