"""The sub-command `measure`: its flags, and what it does with them."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

METHODS = ("topk", "topk_moments", "scan4_regression_64", "scan3_regression_32")
"""What is compared unless the user says otherwise: no training needed, from many bytes a step to few."""
EMBEDDED = "smol"
"""Name of the model that comes with the pinned wheels."""
LATE = ("accelerate", "gguf", "matplotlib")
"""Packages of the extra `measure` that would be missed only after the measurement, or through another library."""
TEXT = (
    "How much of the key-value cache may a model leave unread on these texts before its next token changes? Measures "
    "methods and budgets against full attention, and recommends the cheapest that stays below a distance."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = TEXT
    add = parser.add_argument
    add("model", nargs="?", default=EMBEDDED,
        help="folder of a model or OWNER/NAME on the hub (default: %(default)s, the embedded SmolLM2-135M-Instruct); "
        "a file here is a text for the embedded model")  # fmt: skip
    add("texts", nargs="*", metavar="text", help="text files, folders of them, or wiki, books or code (embedded)")
    add("--length", default="1k", help="tokens of prompt: 512, 1k, 64k, ... (default: %(default)s)")
    add("--documents", type=int, default=6, help="documents of each text (default: %(default)s)")
    add("--tokens", type=int, default=32, help="tokens that follow each prompt (default: %(default)s)")
    add("--methods", nargs="+", default=METHODS, metavar="METHOD",
        help=f"topk is always among them (default: {' '.join(METHODS)})")  # fmt: skip
    add("--budgets", nargs="+", default=("2", "4", "8"), metavar="PERCENT",
        help="share of the prompt that is read exactly, in percent (default: 2 4 8)")  # fmt: skip
    add("--target-kl", type=float, default=0.01, metavar="NATS",
        help="largest acceptable mean KL(full || method) of the next token (default: %(default)s)")  # fmt: skip
    add("--phi", type=Path, metavar="FILE", help="feature maps of this model, for methods with phi in their name")
    add("--seed", type=int, default=0, help="of documents and resampling (default: %(default)s)")
    add("--device", help="cpu, cuda or cuda:1 (default: a GPU if there is one)")
    add("--assets", type=Path, metavar="DIR",
        help="of the embedded model and texts (default: results/assets if there, else one in the cache)")  # fmt: skip
    add("--out", type=Path, default=Path("measured"), metavar="DIR",
        help="every answer gets a folder of its own in it (default: %(default)s)")  # fmt: skip


def run(options: argparse.Namespace) -> None:
    """Measures, prints the answer and writes it to a folder in `--out`; interrupted, it resumes."""
    for package in LATE:
        import_module(package)
    from residual_mass.measure import answer  # with torch and pandas, which the workflow does without
    from residual_mass.measure.distances import Arguments, measure

    found = measure(Arguments.of(options))
    text = answer.printed(found)
    print(text)
    for file in answer.write(found, text):
        print(file)
