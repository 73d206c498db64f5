"""Milliseconds per token on a CPU where a method drafts and full attention verifies.

The first tokens of a text are read once. For longer contexts their keys and values are repeated, so that only times are
meaningful there, not acceptance. Measures the CPU time of the process: with one thread, other work does not add to it
but may slow it. Sides take turns, and the best of all rounds is printed.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from common import SMOL

from residual_mass import partial_decoding
from residual_mass.decode.verify import Pass
from residual_mass.measure.steps import Side, prefilled_cache
from residual_mass.methods import method_named
from residual_mass.model.hook import Prefill, prefill
from residual_mass.model.loading import Backbone, encode, load_backbone
from residual_mass.texts.corpora import read_documents

SCAN = "scan4_regression_64"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--assets", type=Path, default=Path("results/assets"))
    parser.add_argument("--text", default="books")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2000, 8000])
    parser.add_argument("--read", type=int, default=8000, help="tokens of the text that are read")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--verify", type=int, nargs="+", default=[4])
    parser.add_argument("--budget", type=float, default=2.0, help="percent")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    backbone = load_backbone(SMOL, options.assets, torch.device("cpu"))
    documents = "\n\n".join(read_documents(options.text, options.assets))
    ids = encode(backbone.tokenizer, documents[: 8 * options.read + 10_000])[: options.read]
    read = prefill(backbone.model, [ids])
    for length in options.lengths:
        times(backbone, ids, repeated(read, length), length, options)


def repeated(read: Prefill, length: int) -> Prefill:
    """Returns the state of `length` tokens, repeating those that were read."""
    copies = -(-length // read.layers[0][0].shape[2])
    return Prefill({i: tuple(x.repeat(1, 1, copies, 1)[:, :, :length] for x in kv) for i, kv in read.layers.items()})


def times(backbone: Backbone, ids: list[int], read: Prefill, length: int, options: Any) -> None:
    """Prints milliseconds per token of each side at one length, and the accepted tokens of its drafts."""
    prompt = torch.tensor([(ids * (length // len(ids) + 1))[: length + 1]])
    sides: dict[str, tuple[str, Any, bool]] = {"generate, transformers' cache, float32": ("full", None, False)}
    sides |= {f"{name}, packed": (name, None, True) for name in ("full", "cache8", SCAN)}
    sides |= {f"{SCAN}, packed, verify={n}": (SCAN, n, True) for n in options.verify}
    sides[f"topk_moments, torch, verify={options.verify[0]}"] = ("topk_moments", options.verify[0], False)
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    passes: dict[str, list[Pass]] = {side: [] for side in sides}
    for _ in range(options.rounds):
        for side, (name, verify, packed) in sides.items():
            method, budget = method_named(name), options.budget / 100
            cache, extra = prefilled_cache(backbone.model, Side(method, budget, packed), read.layers), {}
            if packed or verify:
                extra["custom_generate"] = partial_decoding(method, budget, verify=verify, passes=passes[side])
            started = time.process_time()
            backbone.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache, do_sample=False,
                eos_token_id=None, pad_token_id=0, max_new_tokens=options.tokens, **extra,
            )  # fmt: skip
            seconds[side].append((time.process_time() - started) / options.tokens)
    print(f"{length} tokens of {options.text}, {options.threads} threads, {options.tokens} tokens a text")
    for side, taken in seconds.items():
        line = f"  {side:44s} {1000 * min(taken):7.1f} ms a token"
        if done := passes[side]:
            accepted, drafted = (
                sum(getattr(step, name) for step in done) / len(done) for name in ("accepted", "drafted")
            )
            draft = min((step.drafting / step.drafted for step in done if step.drafted), default=0)
            line += (
                f"; accepted {accepted:.2f} of {drafted:.2f} a pass; at best a draft {1000 * draft:.1f} ms, a "
                f"verifying pass {1000 * min(step.verifying for step in done):.1f} ms"
            )
        print(line, flush=True)


if __name__ == "__main__":
    main()
