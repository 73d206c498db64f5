"""Bytes that self-speculative decoding reads per token of full attention, by the method that drafts.

Full attention continues held-out documents greedily from several places. Methods are forced along these continuations
from the exact state, which gives their drafts up to the first difference. Methods are some of the registry, and cheaper
ones made of the same parts. Prints a table for each length with the best budget of each method. Drafts in the store are
not computed again, so that a run may be stopped at any time.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
from common import SMOL

from residual_mass import methods
from residual_mass.benchmarks import fidelity
from residual_mass.benchmarks.force import following, write_forced
from residual_mass.diagnostics import residual_errors
from residual_mass.methods import CacheOnly, Method, PerGroup, QuantisedScan, QuantisedValues, Rotated, ScanRegression
from residual_mass.methods.step_bytes import bytes_per_verified_token
from residual_mass.model.loading import backbone_identity, load_backbone, load_tokenizer
from residual_mass.provenance import Record
from residual_mass.recipes import RECIPES
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.columns import DRAFTED
from residual_mass.spec.paths import MANIFEST
from residual_mass.spec.settings import AnchorSpec, MapsSpec, tokens_of
from residual_mass.spec.specs import FidelitySpec, ForceSpec, ResidualErrorsSpec
from residual_mass.texts.corpora import held_out_corpus

SCAN3, SCAN2 = QuantisedScan(3, 128), QuantisedScan(2, 128)
CHEAPER = (
    Method("scan3_regression_8", selector=SCAN3, residual=ScanRegression(8)),
    Method("scan2_regression_32", selector=SCAN2, residual=ScanRegression(32)),
    Method("rotated2_regression_32", selector=Rotated(SCAN2), residual=ScanRegression(32)),
    Method("group3_regression_32", selector=PerGroup(SCAN3), residual=ScanRegression(32)),
    Method("group_rotated2_regression_32", selector=PerGroup(Rotated(SCAN2)), residual=ScanRegression(32)),
    Method("cache3_rotated", selector=CacheOnly(Rotated(QuantisedScan(3))), residual=QuantisedValues(3)),
)
"""Methods with fewer bits, fewer clusters, or one choice of tokens for all query heads of a KV head."""
REGISTERED = (
    "topk", "topk_moments", "scan4_regression_64", "scan3_regression_32", "group4_regression_64",
    "channels_regression_64", "clusters_sums", "cache4_rotated",
)  # fmt: skip
RESAMPLES = 1000
ARM = ["method", "budget_percent"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--assets", type=Path, default=Path("results/assets"))
    parser.add_argument("--out", type=Path, default=Path("results/verified_bytes"), help="folder of store and results")
    parser.add_argument("--lengths", nargs="+", default=["2k", "8160"])
    parser.add_argument("--texts", nargs="+", default=["wiki", "code"])
    parser.add_argument("--methods", nargs="+", default=[*REGISTERED, *(method.name for method in CHEAPER)])
    parser.add_argument("--phi", type=Path, help="feature maps, for methods that need some")
    parser.add_argument("--documents", type=int, default=6, help="of each text")
    parser.add_argument("--places", type=int, default=4, help="in each document")
    parser.add_argument("--budgets", type=float, nargs="+", default=[1.0, 2.0, 4.0], help="percent")
    options = parser.parse_args()
    methods.METHODS = (*methods.METHODS, *CHEAPER)
    for length in options.lengths:
        drawn = f"{options.documents} documents of each, {options.places} places in each, {DRAFTED} tokens from each"
        print(f"{length} tokens, {' and '.join(options.texts)}: {drawn}\n")
        print(markdown(measured(options, length), options.texts))


def measured(options: argparse.Namespace, length: str) -> pd.DataFrame:
    """Returns h, share read and bytes per verified token by text, method and budget, from the stages of a study."""
    names = tuple(options.methods)
    texts = tuple(options.texts)
    store = options.out / f"{length}.jsonl"
    folder = options.out / "-".join((length, *texts))
    maps = () if options.phi is None else (MapsSpec("phi", tokens_of(length)),)
    arms = []
    for name in names:
        rule = methods.method_named(name)
        budgets = options.budgets[:1] if rule.selector.replaces_cache else options.budgets
        arms += [ArmSpec(name, budget, "phi" if maps and rule.needs_maps else None) for budget in budgets]
    about = {"study": "verified_bytes", "backbone": SMOL, "length": length, "seed": 0}
    spec = ForceSpec(
        **about,
        corpora=texts,
        documents=options.documents,
        tokens=DRAFTED,
        drafts=options.places,
        asked=(),
        arms=tuple(arms),
        arms_of_documents=(),
        anchors=AnchorSpec(),
        truncate_to=length,
        maps=maps,
        recipe=RECIPES["force"],
    )
    tokenizer = load_tokenizer(SMOL.model_id, SMOL.revision, SMOL.source, options.assets)
    drafts = []
    for text in texts:
        corpus = held_out_corpus(text, tokenizer, tokens_of(length) + 1, 0, options.assets)
        drafts += following(spec, text, corpus.disjoint(options.documents), ())
    forced = folder / "forced.parquet"
    found = folder / "fidelity.csv"
    shares = folder / "residual_errors.csv"
    record = Record("force", spec, [options.assets / MANIFEST])
    identity = backbone_identity(SMOL, options.assets)
    phi = {each.label: options.phi for each in maps}
    write_forced(spec, drafts, identity, lambda: load_backbone(SMOL, options.assets), phi, store, forced)
    record.write(forced)
    scored = FidelitySpec(**about, recipe=RECIPES["fidelity"], bootstrap_resamples=RESAMPLES)
    fidelity.run(scored, forced, found)
    if not shares.exists():
        with_topk = tuple(dict.fromkeys(("topk", *names)))
        read = ResidualErrorsSpec(
            **about,
            corpora=texts,
            methods=with_topk,
            budgets=tuple(options.budgets),
            packs=1,
            queries=4,
            maps=next(iter(maps), None),
            anchors=AnchorSpec(),
            bootstrap_resamples=RESAMPLES,
            recipe=RECIPES["residual_errors"],
        )
        residual_errors.run(read, options.assets, options.phi, folder / "heads.parquet", shares)
    reads = pd.read_csv(shares).rename(columns={"corpus": "text"})[["text", *ARM, "step_share"]]
    rows = pd.read_csv(found)[["text", *ARM, "value", "ci_low", "ci_high"]].merge(reads, on=["text", *ARM])
    for name in ("value", "ci_low", "ci_high"):
        pairs = zip(rows["step_share"], rows[name], strict=True)
        rows[[f"bytes_{name}", f"n_{name}"]] = [bytes_per_verified_token(*pair, DRAFTED) for pair in pairs]
    return rows


def markdown(rows: pd.DataFrame, texts: list[str]) -> str:
    """Returns a table with each method's budget that has the least mean over texts, best method first."""
    mean = rows.groupby(ARM)["bytes_value"].mean()
    best = mean.loc[mean.groupby("method").idxmin()].sort_values()
    lines = ["| method | budget |" + "".join(f" {text}: read | h | bytes per verified token | n |" for text in texts)]
    lines.append("|---|---|" + "---|---|---|---|" * len(texts))
    for method, budget in best.index:
        cells = [method, f"{budget:g} %"]
        for text in texts:
            row = rows[(rows["text"] == text) & (rows["method"] == method) & (rows["budget_percent"] == budget)].iloc[0]
            interval = f"{row['bytes_ci_low']:.2f} .. {row['bytes_ci_high']:.2f}"
            cells += [f"{row['step_share']:.3f}", f"{row['value']:.3f}", f"{row['bytes_value']:.3f} ({interval})"]
            cells.append(f"{row['n_value']:.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
