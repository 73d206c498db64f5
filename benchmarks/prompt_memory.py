"""Memory of a process after a prompt of random tokens: this package, or transformers' own loop, in bfloat16.

python benchmarks/prompt_memory.py MODEL TOKENS [METHOD]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from residual_mass import partial_decoding


def resident() -> int:
    """Returns the resident MiB of this process."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) // 1024


def main(folder: str, tokens: str, method: str | None = None) -> None:
    before = resident()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ids = torch.randint(5, 40000, (1, int(tokens)), generator=torch.Generator().manual_seed(0))
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    if method is not None:
        options["custom_generate"] = partial_decoding(method, 0.04)
    output = model.generate(ids, return_dict_in_generate=True, **options)
    print(f"{method or 'transformers'}, {tokens} tokens: {resident() - before} MiB", output.sequences.shape[1])


if __name__ == "__main__":
    main(*sys.argv[1:])
