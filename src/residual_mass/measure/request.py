"""What `residual-mass measure` is asked: its flags, each declared once, and the names that a user writes."""

from __future__ import annotations

import argparse
import logging
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from residual_mass.methods import method_named
from residual_mass.methods.arms import percent_written
from residual_mass.methods.served import FEWEST_BYTES, READ_WHOLE, RECOMMENDED
from residual_mass.metrics import written_budget
from residual_mass.spec.settings import tokens_of
from residual_mass.spec.texts import ASSETS

log = logging.getLogger(__name__)

BASELINE = "topk"
"""Method whose KL divides that of the others."""
DEFAULT_METHODS = (BASELINE, "topk_moments", READ_WHOLE, RECOMMENDED, FEWEST_BYTES)
"""Default of `--methods`, from many bytes a step to few; they need no training. On a CPU the kernels serve two of them,
on a GPU the first two.
"""
DEFAULT_BUDGETS = ("2", "4", "8")
STORE_NAME = "store.jsonl"
"""Name of the file with the distances of all answers in a folder."""
EMBEDDED = "smol"
"""Name of the model that comes with the pinned wheels."""
DEFAULT_TEXTS = ("wiki", "code")
MEASURE_HELP = (
    "How much of the key-value cache may a model leave unread on these texts before its next token changes? Measures "
    "methods and budgets against full attention, and recommends the one whose step is fastest on this machine among "
    "those that stay below a distance."
)


def flag(default: Any, text: str, **options: Any) -> Any:
    """Returns a field that is a flag of the command; one with `nargs` of `?` or `*` is an argument without dashes.

    Args:
        text: its help.
        options: of `add_argument`.
    """
    return field(metadata={"default": default, "help": text, **options})


@dataclass(frozen=True)
class Request:
    """The checked flags of the command; budgets are in percent of the prompt, anchors included."""

    model: str = flag(
        EMBEDDED, "folder of a model, GGUF file, or OWNER/NAME on the hub (default: %(default)s, the embedded "
        "SmolLM2-135M-Instruct); a file here is a text for the embedded model", nargs="?",
    )  # fmt: skip
    texts: tuple[str, ...] = flag(
        (), "text files, folders of them, or wiki, books or code (embedded)", nargs="*", metavar="text"
    )
    length: str = flag("1k", "tokens of prompt: 512, 1k, 64k, ... (default: %(default)s)")
    documents: int = flag(6, "documents of each text (default: %(default)s)", type=int)
    tokens: int = flag(32, "tokens that follow each prompt (default: %(default)s)", type=int)
    methods: tuple[str, ...] = flag(
        None, "methods to compare; topk is always added (default: " + " ".join(DEFAULT_METHODS)
        + ")", nargs="+", metavar="METHOD",
    )  # fmt: skip
    budgets: tuple[float, ...] = flag(
        None, "share of the prompt that is read exactly, in percent (default: " + " ".join(DEFAULT_BUDGETS) + ")",
        nargs="+", metavar="PERCENT",
    )  # fmt: skip
    target_kl: float = flag(
        0.01, "largest acceptable mean KL(full || method) of the next token (default: %(default)s)",
        type=float, metavar="NATS",
    )  # fmt: skip
    weights: int | None = flag(
        None, "pack the weights in 4 or 8 bits first, on a CPU; what that costs is measured apart",
        type=int, choices=(4, 8), metavar="BITS",
    )  # fmt: skip
    compile: bool = flag(
        False, "time methods' steps as one compiled graph, on a CPU; the first takes up to a minute or two",
        action="store_true",
    )  # fmt: skip
    special_tokens: bool = flag(
        False, "read names of special tokens in files, such as <|im_end|>, as tokens (default: as text)",
        action="store_true",
    )  # fmt: skip
    phi: Path | None = flag(
        None, "feature maps of this model, for methods with phi in their name", type=Path, metavar="FILE"
    )
    seed: int = flag(0, "seed of the documents (default: %(default)s)", type=int)
    device: str | None = flag(None, "cpu, cuda or cuda:1 (default: a GPU if there is one)")
    assets: Path = flag(
        None, "folder of the embedded model and texts (default: results/assets if there, or in the cache)",
        type=Path, metavar="DIR",
    )  # fmt: skip
    out: Path = flag(
        Path("measured"), "folder in which each answer gets its own folder (default: %(default)s)",
        type=Path, metavar="DIR",
    )  # fmt: skip

    @classmethod
    def of(cls, options: argparse.Namespace) -> Request:
        """Checks the flags.

        Raises:
            ValueError: a number is out of range, a budget looks like a share, a method is unknown, is `full` or lacks
                its maps, or a name cannot be written.
        """
        for name in ("documents", "tokens"):
            if getattr(options, name) < 1:
                raise ValueError(f"--{name} is {getattr(options, name)}, not 1 or more")
        if not 0 < options.target_kl < math.inf:
            raise ValueError(f"--target-kl is {options.target_kl:g}; write a distance above 0 in nats, such as 0.01")
        values = {each.name: getattr(options, each.name) for each in fields(cls)}
        model = options.model
        texts = options.texts
        if model in ASSETS or (os.path.isfile(model) and not model.endswith(".gguf")):  # a text for the embedded model
            texts = [model, *texts]
            model = EMBEDDED
        values["model"] = model if model == EMBEDDED else normalised(model)
        values["texts"] = distinct(texts or DEFAULT_TEXTS)
        if options.assets is None:
            embedded = values["model"] == EMBEDDED or not ASSETS.keys().isdisjoint(values["texts"])
            values["assets"] = assets_folder(needed=embedded)
        for name in ("assets", "out", "phi"):
            require_utf8(str(values[name]), f"--{name}")
        methods = options.methods or DEFAULT_METHODS
        values["methods"] = methods_of(methods, options.phi)
        if options.budgets is not None and not any(method_named(name).chooses for name in methods):
            log.warning("--budgets are those of %s alone: %s read all tokens", BASELINE, ", ".join(methods))
        # As result files write them: rows are joined by budget.
        budgets = [written_budget(percent_written(text)) for text in options.budgets or DEFAULT_BUDGETS]
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for every field of `Request`."""
    parser.description = MEASURE_HELP
    for each in fields(Request):
        positional = each.metadata.get("nargs") in ("?", "*")
        name = each.name if positional else "--" + each.name.replace("_", "-")
        parser.add_argument(name, **each.metadata)


def methods_of(names: Iterable[str], phi: Path | None) -> tuple[str, ...]:
    """Returns the methods to compare, each once, BASELINE first.

    Raises:
        ValueError: a method is unknown or `full`, or lacks its maps.
    """
    for name in names:
        method = method_named(name)
        if method.whole_prefix:
            raise ValueError(f"--methods: {name} is what the others are compared with; leave it out")
        if method.needs_maps and phi is None:
            raise ValueError(f"--methods: {name} needs feature maps of this model; pass their file to --phi")
    return tuple(dict.fromkeys((BASELINE, *names)))


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


# ---- names -----------------------------------------------------------------------------------------------------------


def normalised(name: str) -> str:
    """Returns a path without `.` and slashes that mean nothing; a folder called like a corpus keeps its `./`.

    Raises:
        ValueError: the name is empty.
    """
    if not name:
        raise ValueError("a model or text has an empty name; write . for the current folder")
    path = str(Path(name))
    return f"./{path}" if path in ASSETS and name != path else path


def distinct(texts: Iterable[str]) -> tuple[str, ...]:
    """Returns normalised names of corpora, files and folders, without further names of the same ones."""
    found: dict[str, str] = {}
    for name in map(normalised, texts):
        place = name if name in ASSETS else os.path.realpath(name)
        found.setdefault(place, name)
    return tuple(found.values())


def printable(name: str) -> str:
    """Returns a name for files and terminals: bytes that are not UTF-8, and characters that do not print, escaped."""
    text = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    escaped = []
    for character in text:
        escape = character.encode("unicode_escape").decode()
        escaped.append(character if character.isprintable() else escape)
    return "".join(escaped)


def title_of(name: str) -> str:
    """Returns the last part of a path, which is never empty, as it is shown."""
    own = Path(name).name
    real = Path(os.path.realpath(name))
    return printable(own if own not in ("", "..") else real.name or str(real))


def text_name(folder: str) -> str:
    """Returns the name of the text that is a folder."""
    return printable(folder) if Path(folder).name not in ("", "..") else title_of(folder)


def require_utf8(path: str, what: str) -> None:
    """Raises ValueError if a path has bytes that are not UTF-8, which libraries and JSON cannot write."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{what} {printable(path)}: this name is not UTF-8; rename it, or choose another folder"
        ) from None
