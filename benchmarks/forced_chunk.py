"""Given continuations under all arms as chunks, against the same tokens one decode step at a time; equal
log-probabilities.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from shared_prefill import ARMS, SMOL
from timing import alternate, report
from torch import Tensor

from residual_mass.core.settings import AnchorSpec
from residual_mass.model.engine import SharedPrefillEngine
from residual_mass.model.forced import ForcedDecoder
from residual_mass.model.hook import attention_hook
from residual_mass.model.loading import load_backbone
from residual_mass.model.phi_maps import PhiMaps
from residual_mass.texts.corpora import held_out_corpus

TOLERANCE = 1e-3
"""Of log-probabilities: float32 through 30 layers, in different orders of summation."""


@torch.no_grad()
def one_by_one(engine: SharedPrefillEngine, prefix: list[int], tokens: list[int]) -> Tensor:
    """Log-probabilities [A, T, V] of the engine's own decode steps, all arms as one batch, fed with given tokens."""
    layers, _ = engine.read([prefix])
    decoder = engine._decoder(layers, [len(prefix)], len(tokens))
    steps = []
    with attention_hook(engine.backbone.model, decoder):
        for step, token in enumerate(tokens):
            ids = torch.full((len(ARMS), 1), token)
            positions = torch.full((len(ARMS), 1), len(prefix) + step)
            logits = engine.backbone.model(ids, position_ids=positions, use_cache=False).logits
            steps.append(logits[:, 0].log_softmax(-1))
    return torch.stack(steps, dim=1)


def as_chunks(engine: SharedPrefillEngine, prefix: list[int], tokens: list[int]) -> Tensor:
    decoder = ForcedDecoder(engine, prefix)
    full, _ = decoder.full(tokens)
    return torch.stack([logits.log_softmax(-1) for logits in (full, *decoder.logits(ARMS[1:], tokens))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--assets", type=Path, default=Path("results/assets"))
    parser.add_argument("--phi", type=Path, default=Path("results/phi/smol_2k.safetensors"))
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()

    backbone = load_backbone(SMOL, options.assets)
    corpus = held_out_corpus("wiki", backbone.tokenizer, options.length + options.tokens, 0, options.assets)
    ids = corpus.sequence(0)
    prefix, tokens = ids[: options.length], ids[options.length :]
    engine = SharedPrefillEngine(backbone, ARMS, AnchorSpec(), PhiMaps.load(options.phi), options.length)
    difference = float((one_by_one(engine, prefix, tokens) - as_chunks(engine, prefix, tokens)).abs().max())
    if difference > TOLERANCE:
        raise SystemExit(f"the two sides differ by {difference:.2g} nats")
    print(f"{torch.get_num_threads()} threads, {len(ARMS)} arms, log-probabilities equal to {difference:.1g} nats")
    report(
        f"{options.tokens} tokens after {options.length}, prefill included, {backbone.device}",
        alternate(
            {
                "one step at a time": lambda: one_by_one(engine, prefix, tokens),
                "as chunks": lambda: as_chunks(engine, prefix, tokens),
            },
            options.rounds,
        ),
    )


if __name__ == "__main__":
    main()
