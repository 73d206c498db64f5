"""Summaries of captured rows: means with intervals, and which of the paper's statements on its diagnostics hold.

Intervals come from a two-way bootstrap over heads and packs, see `samples`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from residual_mass.diagnostics.claims import PAPER_CLAIMS, Claim
from residual_mass.diagnostics.samples import Sample, estimate, text
from residual_mass.files import csv_text, write_text
from residual_mass.metrics import budget_text
from residual_mass.provenance import Record
from residual_mass.spec.specs import FindingsSpec
from residual_mass.spec.texts import CWE

ACCOUNTING_COLUMNS = (
    "study backbone corpus length maps budget_percent k e_topk e_topk_ci_low e_topk_ci_high e_nosub e_nosub_ci_low "
    "e_nosub_ci_high e_sub e_sub_ci_low e_sub_ci_high e_exact_sub e_exact_nosub log_z_error log_z_error_ci_low "
    "log_z_error_ci_high clamped_share packs heads rows model_id revision weights phi_sha"
).split()
CLAIM_COLUMNS = (
    "study backbone claim statement shown_in corpus length k primary statistic estimate ci_low ci_high verdict "
    "clamped_share packs heads model_id revision weights phi_sha"
).split()
ALL_SETTINGS = "all"
"""Corpus and length of a claim about all settings."""
CsvRow = dict[str, Any]


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
    as_is = [Sample.read(*files, spec.budget_percent) for files in zip(heads, mass, strict=True)]
    drawn = [sample.resampled(spec.bootstrap_resamples, spec.seed) for sample in as_is]
    rows: list[CsvRow] = []
    for sample, draws in zip(as_is, drawn, strict=True):
        rows += _accounting(sample, draws)
    write_text(accounting, csv_text(ACCOUNTING_COLUMNS, rows))
    write_text(claims, csv_text(CLAIM_COLUMNS, _claims(spec, as_is, drawn)))
    for path in (accounting, claims):
        record.write(path)


def _accounting(as_is: Sample, drawn: Sample) -> Iterator[CsvRow]:
    common = as_is.facts | _sizes(as_is) | {"rows": as_is.rows}
    for budget, k in as_is.ks.items():
        row: CsvRow = {**common, "budget_percent": budget_text(budget), "k": k}
        for name in ("e_topk", "e_nosub", "e_sub"):
            row |= estimate(as_is.mean(name, budget), drawn.mean(name, budget)).columns(name)
        row |= estimate(as_is.log_z_error(budget), drawn.log_z_error(budget)).columns("log_z_error")
        row["e_exact_sub"] = text(as_is.mean("e_exact_sub", budget)[0], ".3e")
        row["e_exact_nosub"] = text(as_is.mean("e_exact_nosub", budget)[0])
        row["clamped_share"] = text(as_is.mean("clamped", budget)[0])
        yield row


def _claims(spec: FindingsSpec, as_is: Sequence[Sample], drawn: Sequence[Sample]) -> Iterator[CsvRow]:
    for sample, draws in zip(as_is, drawn, strict=True):
        applying = [claim for claim in PAPER_CLAIMS if claim.applies(sample)]
        for claim in applying:
            row = _claim(claim, sample, draws, [sample])
            if not row:
                continue
            if claim.one_budget:
                row["k"] = sample.ks[sample.budget]
            corpus = CWE if claim.about == CWE else spec.corpus
            row["primary"] = int(sample.name == f"{corpus} {spec.length}")
            yield row
    about_all = [claim for claim in PAPER_CLAIMS if claim.about == "all"]
    for claim in about_all:
        row = _claim(claim, as_is, drawn, as_is)
        yield row | {"corpus": ALL_SETTINGS, "length": ALL_SETTINGS, "primary": 1}


def _claim(claim: Claim, as_is: Any, drawn: Any, samples: Sequence[Sample]) -> CsvRow:
    """Returns the row of a claim about these samples; empty if there is nothing to compare."""
    numbers = claim.number(as_is)
    if not numbers.size:
        return {}
    found = estimate(numbers, claim.number(drawn), claim.extreme)
    low = text(found.low, claim.decimals)
    high = text(found.high, claim.decimals)
    smallest = min(samples, key=lambda sample: sample.packs.size)
    row = {name: fact for name, fact in samples[0].facts.items() if name in CLAIM_COLUMNS}
    row |= _sizes(smallest)
    row |= {"claim": claim.name, "statement": claim.statement}
    row |= {"shown_in": claim.shown_in, "statistic": claim.statistic}
    row |= {"estimate": text(found.value, claim.decimals), "ci_low": low, "ci_high": high}
    row["verdict"] = _verdict(low, high)
    row["clamped_share"] = text(_clamped_share(claim, samples))
    return row


def _verdict(low: str, high: str) -> str:
    """Decides by the printed interval, so that rounding errors around 0 decide nothing; an empty one is undecided."""
    if low and float(low) > 0:
        return "holds"
    if high and float(high) < 0:
        return "does not hold"
    return "undecided"


def _clamped_share(claim: Claim, samples: Sequence[Sample]) -> float:
    """Returns the mean over the samples, at the budgets that the claim is about."""
    shares = []
    for sample in samples:
        budgets = [sample.budget] if claim.one_budget else sample.ks
        shares += [sample.mean("clamped", budget)[0] for budget in budgets]
    return float(np.mean(shares))


def _sizes(sample: Sample) -> CsvRow:
    return {"packs": sample.packs.shape[1], "heads": sample.heads.shape[1]}
