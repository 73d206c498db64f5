"""The sub-command `measure`: its flags, and what it does with them."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from residual_mass.core.settings import tokens_of

METHODS = ("topk", "topk_moments", "scan4_regression_64", "scan3_regression_32", "clusters_sums")
"""What is compared unless the user says otherwise: no training needed, from many bytes a step to few."""
EMBEDDED = "smol"
"""Name of the model that comes with the pinned wheels."""
BUDGETS = (2.0, 4.0, 8.0)
TEXT = (
    "How much of the key-value cache may a model leave unread on these texts before its next token changes? Measures "
    "methods and budgets against full attention, and recommends the cheapest that stays below a distance."
)


@dataclass(frozen=True)
class Asked:
    """What the user asks for.

    Attributes:
        model: hub id or folder, or EMBEDDED.
        texts: files, folders and names of corpora in the assets.
        length: label of the prompts' length.
        documents: of each text; each continues for `tokens` tokens.
        budgets: in percent of the prompt, anchors included.
        target_kl: in nats.
        phi: file of feature maps.
        device: as torch names it; None takes a GPU if there is one.
        assets: folder of the embedded model and the corpora; None takes the checkout's or one in the user's cache.
        out: folder of the results.
    """

    model: str
    texts: tuple[str, ...]
    length: str
    documents: int
    tokens: int
    methods: tuple[str, ...]
    budgets: tuple[float, ...]
    target_kl: float
    phi: Path | None
    seed: int
    device: str | None
    assets: Path | None
    out: Path

    def __post_init__(self) -> None:
        for name in ("documents", "tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} is {getattr(self, name)}, not 1 or more")
        if not 0 < self.target_kl < float("inf"):
            raise ValueError(f"--target-kl is {self.target_kl:g}; write a distance above 0 in nats, such as 0.01")

    @property
    def length_in_tokens(self) -> int:
        return tokens_of(self.length)

    @property
    def assets_folder(self) -> Path:
        if self.assets is not None:
            return self.assets
        of_checkout = Path("results", "assets")
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return of_checkout if of_checkout.is_dir() else cache / "residual-mass" / "assets"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = TEXT
    add = parser.add_argument
    add("model", nargs="?", default=EMBEDDED,
        help="hub id or folder of a model (default: %(default)s, the embedded SmolLM2-135M-Instruct)")  # fmt: skip
    add("texts", nargs="*", metavar="text", help="text files, folders of them, or wiki, books, code, tables (embedded)")
    add("--length", default="1k", help="tokens of prompt: 512, 1k, 64k, ... (default: %(default)s)")
    add("--documents", type=int, default=6, help="documents of each text (default: %(default)s)")
    add("--tokens", type=int, default=32, help="tokens that follow each prompt (default: %(default)s)")
    add("--methods", nargs="+", default=METHODS, metavar="METHOD", help=f"default: {' '.join(METHODS)}")
    add("--budgets", nargs="+", type=float, default=BUDGETS, metavar="PERCENT",
        help="share of the prompt that is read exactly, in percent (default: 2 4 8)")  # fmt: skip
    add("--target-kl", type=float, default=0.01, metavar="NATS",
        help="largest acceptable mean KL(full || method) of the next token (default: %(default)s)")  # fmt: skip
    add("--phi", type=Path, metavar="FILE", help="feature maps of this model, for methods with phi in their name")
    add("--seed", type=int, default=0, help="of documents and resampling (default: %(default)s)")
    add("--device", help="cpu, cuda or cuda:1 (default: a GPU if there is one)")
    add(
        "--assets",
        type=Path,
        metavar="DIR",
        help="folder of the embedded model and texts (default: results/assets if it exists, else one in the cache)",
    )
    add(
        "--out", type=Path, default=Path("measured"), metavar="DIR", help="folder of the results (default: %(default)s)"
    )


def asked_of(options: argparse.Namespace) -> Asked:
    given = {name: getattr(options, name) for name in Asked.__dataclass_fields__}
    listed = {name: tuple(dict.fromkeys(given[name])) for name in ("texts", "methods", "budgets")}
    return Asked(**given | listed)


def run(options: argparse.Namespace) -> None:
    """Measures, prints the answer and writes it to the folder `--out`; interrupted, it resumes."""
    asked = asked_of(options)
    from residual_mass.measure import answer, page  # torch and matplotlib, which the workflow does without
    from residual_mass.measure.distances import measure

    found = measure(asked)
    print(answer.printed(found))
    for file in page.write(found, asked.out):
        print(file)
