"""A prompt read in part (`core.prompts`): distance of the tokens after it from full attention, and seconds of the CPU.

Each text is cut to a length. All but its last 128 tokens are the prompt, which every side reads its own way; full
attention then reads the others over the keys and values of each. The KL is that of the next token from the side that
read all of the prompt.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from residual_mass.core.prompts import PromptCut
from residual_mass.decode.backend import LayerCall
from residual_mass.decode.text import Text
from residual_mass.decode.torch_backend import TorchBackend
from residual_mass.kernels.prompt import attention_in_part, heads_apart, prompt_library
from residual_mass.methods import method_named
from residual_mass.methods.arms import Arm
from residual_mass.spec.settings import AnchorSpec

CONTINUED = 128
"""Tokens after the prompt."""
SHORT = 1024
"""Prompts below this length are read whole."""


class PartBackend(TorchBackend):
    """Full attention, but prompts are read in part where `left` is a number, after a test of the heads in each layer.

    Attributes:
        whole: number of heads that were read whole so far.
        seconds: of the attention of prompts.
    """

    left: float | None = None
    most = 0.2
    cut = PromptCut()
    whole = 0
    seconds = 0.0

    def read(self, call: LayerCall) -> Tensor:
        started = time.process_time()
        if self.left is None or call.query.shape[2] < SHORT:
            output = super().read(call)
        else:
            self.stored(call)
            asked = call.query, call.key, call.value, call.scale, self.left, self.cut
            library = prompt_library(*asked[:3])
            whole = heads_apart(library, *asked, self.most)
            self.whole += int(whole.sum())
            output = attention_in_part(library, *asked, whole=whole)
        self.seconds += time.process_time() - started
        return output


def sides(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields a name and attributes of `PartBackend` for each side; the first reads all."""
    yield "all", {"left": None}
    for left in options.left:
        for block in options.blocks:
            for part in options.parts:
                cut = PromptCut(block=block, part=part)
                rest = f"parts of {part}" if part else "dropped"
                yield f"{left:.0%} left, blocks of {block}, {rest}", {"left": left, "most": options.most, "cut": cut}


@torch.no_grad()
def read(model: PreTrainedModel, prompt: Tensor, own: dict[str, Any]) -> tuple[Text, float]:
    """Returns a text after a prompt [1, L], and the seconds of the CPU that it took."""
    backend = PartBackend.open(model, Arm(method_named("full"), None), AnchorSpec(), None, None, CONTINUED)
    for name, value in own.items():
        setattr(backend, name, value)
    text = Text(model, backend)
    started = time.process_time()
    text.read(prompt)
    return text, time.process_time() - started


@torch.no_grad()
def row(text: Text, seconds: float, after: Tensor, base: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the numbers of a side, compared with those of the first."""
    logs = text.step(after)[0].float().log_softmax(-1)
    own = {"logs": logs, "heads": text.backend.whole, "seconds": seconds, "attention": text.backend.seconds}
    base = own if base is None else base
    kl = (base["logs"].exp() * (base["logs"] - logs)).sum(-1)
    own |= {"KL": float(kl.mean()), "largest": float(kl.max()), "of all": seconds / base["seconds"]}
    return own | {"of attention": own["attention"] / base["attention"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder")
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096])
    parser.add_argument("--left", type=float, nargs="+", default=[0.05], help="shares of the mass that stay unread")
    parser.add_argument("--blocks", type=int, nargs="+", default=[128])
    parser.add_argument("--parts", type=int, nargs="+", default=[256], help="keys of a pseudo-token, 0 for none")
    parser.add_argument("--most", type=float, default=0.2, help="difference from which a head is read whole")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    own = torch.zeros(1, 1, SHORT, 64, dtype=getattr(torch, options.dtype))
    if prompt_library(own, own, own) is None:
        raise SystemExit(f"no kernels read prompts in {options.dtype} here: build them, or give another --dtype")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    shown = ["heads", "KL", "largest", "seconds", "of all", "attention", "of attention"]
    for path in options.texts:
        tokens = tokenizer(path.read_text(encoding="utf-8"))["input_ids"]
        for length in options.lengths:
            if len(tokens) < length:
                raise SystemExit(f"{path} has {len(tokens)} tokens, below {length}: give a longer text")
            ids = torch.tensor([tokens[:length]])
            rows: dict[str, dict[str, Any]] = {}
            for name, own in sides(options):
                read_text = read(model, ids[:, :-CONTINUED], own)
                rows[name] = row(*read_text, ids[:, -CONTINUED:], rows.get("all"))
            print(f"\n{path.name}, {length:,} tokens\n")
            print(pd.DataFrame(rows).T[shown].map(lambda x: f"{x:.3g}").to_markdown(disable_numparse=True))


if __name__ == "__main__":
    main()
