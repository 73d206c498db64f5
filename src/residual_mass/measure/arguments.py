"""The flags of the sub-command `measure`."""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import dataclass, fields
from pathlib import Path

from residual_mass.measure.names import distinct, normalised, require_utf8, title_of
from residual_mass.methods.arms import percent_written
from residual_mass.methods.served import FEWEST_BYTES, READ_WHOLE, RECOMMENDED
from residual_mass.metrics import written_budget
from residual_mass.spec.settings import tokens_of
from residual_mass.spec.texts import ASSETS

BASELINE = "topk"
"""Method whose KL divides that of the others."""
DEFAULT_METHODS = (BASELINE, "topk_moments", READ_WHOLE, RECOMMENDED, FEWEST_BYTES)
"""Default of `--methods`, from many bytes a step to few; they need no training. On a CPU the kernels serve two of them,
on a GPU the first two.
"""
EMBEDDED = "smol"
"""Name of the model that comes with the pinned wheels."""
DEFAULT_TEXTS = ("wiki", "code")
MEASURE_HELP = (
    "How much of the key-value cache may a model leave unread on these texts before its next token changes? Measures "
    "methods and budgets against full attention, and recommends the one whose step is fastest on this machine among "
    "those that stay below a distance."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = MEASURE_HELP
    add = parser.add_argument
    add("model", nargs="?", default=EMBEDDED,
        help="folder of a model or OWNER/NAME on the hub (default: %(default)s, the embedded SmolLM2-135M-Instruct); "
        "a file here is a text for the embedded model")  # fmt: skip
    add("texts", nargs="*", metavar="text", help="text files, folders of them, or wiki, books or code (embedded)")
    add("--length", default="1k", help="tokens of prompt: 512, 1k, 64k, ... (default: %(default)s)")
    add("--documents", type=int, default=6, help="documents of each text (default: %(default)s)")
    add("--tokens", type=int, default=32, help="tokens that follow each prompt (default: %(default)s)")
    add("--methods", nargs="+", metavar="METHOD",
        help=f"methods to compare; topk is always added (default: {' '.join(DEFAULT_METHODS)})")  # fmt: skip
    add("--budgets", nargs="+", default=("2", "4", "8"), metavar="PERCENT",
        help="share of the prompt that is read exactly, in percent (default: 2 4 8)")  # fmt: skip
    add("--target-kl", type=float, default=0.01, metavar="NATS",
        help="largest acceptable mean KL(full || method) of the next token (default: %(default)s)")  # fmt: skip
    add("--weights", type=int, choices=(4, 8), metavar="BITS",
        help="pack the weights in 4 or 8 bits first, on a CPU; what that costs is measured apart")  # fmt: skip
    add("--compile", action="store_true",
        help="time methods' steps as one compiled graph, on a CPU; the first takes up to a minute or two")  # fmt: skip
    add("--special-tokens", action="store_true",
        help="read names of special tokens in files, such as <|im_end|>, as tokens (default: as text)")  # fmt: skip
    add("--phi", type=Path, metavar="FILE", help="feature maps of this model, for methods with phi in their name")
    add("--seed", type=int, default=0, help="seed of the documents and of resampling (default: %(default)s)")
    add("--device", help="cpu, cuda or cuda:1 (default: a GPU if there is one)")
    add("--assets", type=Path, metavar="DIR",
        help="folder of the embedded model and texts (default: results/assets if there, or in the cache)")  # fmt: skip
    add("--out", type=Path, default=Path("measured"), metavar="DIR",
        help="folder in which each answer gets its own folder (default: %(default)s)")  # fmt: skip


@dataclass(frozen=True)
class Arguments:
    """The flags of the command; budgets in percent of the prompt, anchors included."""

    model: str
    texts: tuple[str, ...]
    length: str
    documents: int
    tokens: int
    methods: tuple[str, ...]
    budgets: tuple[float, ...]
    target_kl: float
    weights: int | None
    compile: bool
    special_tokens: bool
    phi: Path | None
    seed: int
    device: str | None
    assets: Path
    out: Path

    @classmethod
    def of(cls, options: argparse.Namespace) -> Arguments:
        """Checks the flags; raises ValueError for a number out of range, or a budget that looks like a share."""
        for name in ("documents", "tokens"):
            if getattr(options, name) < 1:
                raise ValueError(f"--{name} is {getattr(options, name)}, not 1 or more")
        if not 0 < options.target_kl < math.inf:
            raise ValueError(f"--target-kl is {options.target_kl:g}; write a distance above 0 in nats, such as 0.01")
        values = {field.name: getattr(options, field.name) for field in fields(cls)}
        model = options.model
        texts = options.texts
        if model in ASSETS or os.path.isfile(model):  # a text for the embedded model
            texts = [model, *texts]
            model = EMBEDDED
        values["model"] = model if model == EMBEDDED else normalised(model)
        values["texts"] = distinct(texts or DEFAULT_TEXTS)
        if options.assets is None:
            embedded = values["model"] == EMBEDDED or not ASSETS.keys().isdisjoint(values["texts"])
            values["assets"] = assets_folder(needed=embedded)
        for name in ("assets", "out", "phi"):
            require_utf8(str(values[name]), f"--{name}")
        methods = (BASELINE, *(options.methods or DEFAULT_METHODS))
        values["methods"] = tuple(dict.fromkeys(methods))
        # As result files write them: rows are joined by budget.
        budgets = [written_budget(percent_written(text)) for text in options.budgets]
        values["budgets"] = tuple(dict.fromkeys(budgets))
        return cls(**values)

    @property
    def name(self) -> str:
        """Name of the model in titles and files."""
        return title_of(self.model)

    @property
    def prompt_tokens(self) -> int:
        return tokens_of(self.length)

    @property
    def document_tokens(self) -> int:
        """Length of a document: a prompt, the token after it, and the continuation."""
        return self.prompt_tokens + 1 + self.tokens


def assets_folder(needed: bool) -> Path:
    """Returns the folder of the embedded model and texts: in the checkout, else in the user's cache.

    Raises:
        ValueError: it is needed, and the user has no home folder.
    """
    checkout = Path("results", "assets")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    if checkout.is_dir():
        return checkout
    if needed and cache.parts[0] == "~":
        raise ValueError("there is no home folder for the embedded model and texts; name a folder with --assets")
    return cache / "residual-mass" / "assets"
