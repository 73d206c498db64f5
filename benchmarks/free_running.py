"""KL from full attention by position, along a document's own text and along the text that a method writes itself.

Errors of a method go into the keys and values of the tokens that it generates. Along a given text the tokens stay those
of the document; along its own text a method also answers for the tokens that it chose. In both, full attention reads
the same tokens after the same prompt, which is read exactly. One row of the CSV is a token; documents that it holds are
not computed again.
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from residual_mass.benchmarks.force import token_measures
from residual_mass.decode.backends import ANCHORS, backend_for
from residual_mass.decode.engine import SharedPrefillEngine
from residual_mass.decode.forced import ForcedDecoder
from residual_mass.decode.text import Text
from residual_mass.measure.models import find_model
from residual_mass.methods import method_named
from residual_mass.model.loading import Backbone, load_backbone
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.settings import tokens_of
from residual_mass.texts.corpora import held_out_corpus

DOCUMENT = ["model", "length", "text", "document"]
BUCKETS = [0, 16, 64, 128, 256, 512, 1024]
"""Borders of the positions that are averaged."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="smol, a folder, a GGUF file, or a name on the hub")
    parser.add_argument("--lengths", nargs="+", default=["2k"])
    parser.add_argument("--texts", nargs="+", default=["wiki", "code"])
    parser.add_argument("--documents", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--methods", nargs="+", default=["scan4_regression_64", "cache8"])
    parser.add_argument("--budgets", type=float, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--dtype", default="float32", help="of the model; bfloat16 reads long prompts in less time")
    parser.add_argument("--assets", type=Path, default=Path("results/assets"))
    parser.add_argument("--out", type=Path, default=Path("free_running.csv"))
    options = parser.parse_args()
    device = torch.device("cpu")
    spec = replace(find_model(options.model, options.assets, device), dtype=options.dtype)
    backbone = load_backbone(spec, options.assets, device)
    arms = [
        ArmSpec(name, budget if method_named(name).chooses else 100)
        for name in options.methods
        for budget in (options.budgets if method_named(name).chooses else options.budgets[:1])
    ]
    engine = SharedPrefillEngine(backbone, arms, ANCHORS, None, None)
    done = set()
    if options.out.exists():
        done = set(pd.read_csv(options.out)[DOCUMENT].astype(str).itertuples(index=False, name=None))
    for length in options.lengths:
        count = tokens_of(length)
        for text in options.texts:
            corpus = held_out_corpus(text, backbone.tokenizer, count + 1 + options.tokens, 0, options.assets)
            for number, sequence in enumerate(tqdm(corpus.disjoint(options.documents), desc=f"{text} {length}")):
                document = (backbone.spec.name, length, text, str(number))
                if document in done:
                    continue
                rows = rows_of_document(backbone, engine, arms, sequence[:count], sequence[count:])
                rows = rows.assign(**dict(zip(DOCUMENT, document, strict=True)))
                rows.to_csv(options.out, mode="a", header=not options.out.exists(), index=False)
    print(summary(pd.read_csv(options.out)))


@torch.no_grad()
def rows_of_document(
    backbone: Backbone, engine: SharedPrefillEngine, arms: list[ArmSpec], prompt: list[int], rest: list[int]
) -> pd.DataFrame:
    """Returns a row for each arm, text (given or own) and position.

    Args:
        rest: the token after the prompt, which begins both texts, and the continuation.
    """
    decoder = ForcedDecoder(engine, prompt)
    given = rest[:-1]
    full, _ = decoder.full(given)
    greedy = [given[0], *decoder.greedy(given[0], len(given) - 1)]
    tables = []
    for arm in arms:
        logits = decoder.served(arm, given)
        tables.append(distances(full, logits, arm).assign(along="given"))
        own, logits = own_text(backbone, decoder, arm, given[0], len(given))
        parted = next((place for place, pair in enumerate(zip(own, greedy, strict=False)) if pair[0] != pair[1]), None)
        exact, _ = decoder.full(own)
        tables.append(distances(exact, logits, arm).assign(along="own", parted=parted))
    return pd.concat(tables)


def own_text(
    backbone: Backbone, decoder: ForcedDecoder, arm: ArmSpec, first: int, count: int
) -> tuple[list[int], Tensor]:
    """Returns the tokens that a method writes greedily from a first one on, and its logits [T, V] after each."""
    cache = copy.deepcopy(decoder.served_cache(arm))
    text = Text(backbone.model, backend_for(backbone.model, arm, ANCHORS, cache=cache))
    tokens = [first]
    logits = []
    for _ in range(count):
        logits.append(text.step(torch.tensor([tokens[-1:]]))[0])
        tokens.append(int(logits[-1].argmax()))
    return tokens[:-1], torch.cat(logits)


def distances(full: Tensor, arm: Tensor, spec: ArmSpec) -> pd.DataFrame:
    """Returns the distances of logits [T, V] by position."""
    exact = full.double().log_softmax(-1)
    measures = token_measures(exact, arm.double().log_softmax(-1), exact.argmax(-1))
    rows = {"position": range(len(full)), "kl": measures["kl"], "same_top": measures["same_top"]}
    return pd.DataFrame(rows).assign(method=spec.method, budget=spec.budget_percent)


def summary(rows: pd.DataFrame) -> str:
    """Returns mean KL by position, text, length and arm, and the median position at which texts part, in Markdown."""
    by = ["model", "length", "method", "budget", "along"]
    part = pd.cut(rows["position"], BUCKETS, right=False).astype(str)
    table = rows.assign(part=part).pivot_table(index=by, columns="part", values="kl", sort=False)
    parted = rows.groupby([*by, "text", "document"], sort=False)["parted"].first().groupby(by, sort=False).median()
    return table.join(parted).map("{:.2g}".format).to_markdown()


if __name__ == "__main__":
    main()
