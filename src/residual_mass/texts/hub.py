"""Models and data sets of the Hugging Face hub, in the cache of its own libraries (`HF_HOME`).

`prefetch` fills the cache; with HF_HUB_OFFLINE=1 the libraries read it and do not use the network.
"""

from __future__ import annotations

import errno
import json
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from residual_mass.files import sha256_of
from residual_mass.spec.texts import REVISIONS, HubPart

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger(__name__)

MODEL_FILES = (
    "model*.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json", "tokenizer*",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template*", "LICENSE*", "NOTICE*",
    "USE_POLICY*",
)  # fmt: skip
"""Patterns of the files that are fetched of a model: no pickles, no code."""
PREFETCH_AGAIN = "check the network and run prefetch again, which resumes"
GGUF_ON_HUB = re.compile(r"(\w[\w.-]*/){2}\w[\w.-]*\.gguf")
"""A name of a GGUF file on the hub: OWNER/NAME/FILE.gguf."""
Model = tuple[str, str]
"""Name and revision, or a GGUF file and its SHA-256."""


def prefetch(models: Iterable[Model], parts: Iterable[HubPart]) -> None:
    """Fetches models and data sets into the cache, and reads the data sets once; offline, checks that they are there.

    Raises:
        ValueError: a model or data set cannot be fetched, or is missing offline; names all of them in one line.
    """
    from huggingface_hub.constants import HF_HUB_OFFLINE

    problems = []
    for name, revision in models:
        try:
            _fetch_model(name, revision)
        except ValueError as error:
            problems.append(str(error))
    for part in parts:
        try:
            log.info("data set %s", part)
            rows = hub_rows(part)
            log.info("data set %s: %d rows at commit %s", part, len(rows), commit_of(rows))
        except ValueError as error:
            problems.append(f"data set {part}" if HF_HUB_OFFLINE else str(error))
    if problems and HF_HUB_OFFLINE:
        remedy = "run the target `prefetch` on a machine with network, with the same HF_HOME or a copy of it"
        raise ValueError(f"offline, and the cache of the hub lacks: {'; '.join(problems)}: {remedy}")
    if problems:
        raise ValueError("; ".join(problems))


def _fetch_model(name: str, revision: str) -> None:
    """Fetches a model; offline, raises ValueError if it is not in the cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        if not is_cached(name, revision):
            raise ValueError(f"model {name} at {revision}")
        return
    log.info("model %s", name)
    if name.endswith(".gguf"):
        require_hash(gguf_file(name), revision)
        return
    with one_line_hub_errors(name):
        snapshot_download(name, revision=revision, allow_patterns=list(MODEL_FILES))
    if not is_cached(name, revision):
        raise ValueError(f"{name}: has no safetensors weights; choose another model")


def is_cached(model: str, revision: str) -> bool:
    """Whether configuration and all weights of a model are in the cache."""
    from huggingface_hub import try_to_load_from_cache

    if model.endswith(".gguf"):
        return _gguf_here(model) is not None

    def cached(name: str) -> Path | None:
        path = try_to_load_from_cache(model, name, revision=revision)
        return Path(path) if isinstance(path, str) else None

    index = cached("model.safetensors.index.json")
    files = {"config.json"}
    if index is None:
        files.add("model.safetensors")
    else:  # the file of each weight
        files.update(json.loads(index.read_text())["weight_map"].values())
    return all(cached(name) is not None for name in files)


def gguf_file(name: str) -> Path:
    """Returns a GGUF file of this machine, or `OWNER/NAME/FILE.gguf` in the cache, fetched first if it is not there.

    Raises:
        ValueError: there is no such file.
    """
    here = _gguf_here(name)
    if here is not None:
        return here
    if not GGUF_ON_HUB.fullmatch(name):
        raise ValueError(f"{name}: no such file, and no name on the hub, which is OWNER/NAME/FILE.gguf; check the name")
    from huggingface_hub import hf_hub_download

    repository, _, file = name.rpartition("/")
    with one_line_hub_errors(name, "check the name and the network, or name a file"):
        return Path(hf_hub_download(repository, file))


def _gguf_here(name: str) -> Path | None:
    """Returns a GGUF file of this machine, or of the cache; None if there is none."""
    from huggingface_hub import try_to_load_from_cache

    if Path(name).is_file():
        return Path(name)
    if not GGUF_ON_HUB.fullmatch(name):
        return None
    repository, _, file = name.rpartition("/")
    cached = try_to_load_from_cache(repository, file)
    return Path(cached) if isinstance(cached, str) else None


def require_hash(file: Path, sha256: str) -> None:
    """Raises ValueError if a file is another than it is said to be."""
    found = sha256_of(file)
    if found != sha256:
        raise ValueError(f"{file}: its SHA-256 is {found}, not {sha256}; fetch the file again, or correct the revision")


def hub_rows(part: HubPart) -> Dataset:
    """Reads a part of a data set, memory-mapped from the cache; fetches it first if the cache lacks it.

    Raises:
        ValueError: the part cannot be read; the message is one line.
    """
    import datasets

    revision = REVISIONS.get(part.data_set)
    with one_line_hub_errors(part.data_set):
        return datasets.load_dataset(
            part.data_set, part.configuration, split=part.split, revision=revision, trust_remote_code=False
        )


def commit_of(rows: Dataset) -> str:
    """Returns the commit that a data set was read at: the library's cache has a folder for each."""
    return Path(rows.cache_files[0]["filename"]).parent.name


def commits_of(parts: Iterable[HubPart]) -> dict[str, str]:
    """Returns the commits at which data sets are read, for records."""
    return {part.data_set: commit_of(hub_rows(part)) for part in parts}


@contextmanager
def one_line_hub_errors(repository: str, remedy: str = PREFETCH_AGAIN) -> Iterator[None]:
    """Turns errors of the hub's libraries into a ValueError of one line without the token.

    Use it around calls of these libraries only: they raise a dozen unrelated classes, so it catches all exceptions.

    Args:
        remedy: advice for errors other than missing access or a wrong name.
    """
    from huggingface_hub import get_token

    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise
        message = _message(repository, error, remedy)
        token = get_token()
        if token:
            message = message.replace(token, "(the token)")
        raise ValueError(message) from None


def _message(repository: str, error: Exception, remedy: str) -> str:
    from huggingface_hub import errors

    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else "no message"
    reason = f"{type(error).__name__}: {first}"
    if isinstance(error, errors.GatedRepoError) or "gated dataset" in first:
        access = "accept its licence on its page on the hub, then set HF_TOKEN or run `hf auth login`"
        return f"{repository}: access is restricted: {access}"
    if isinstance(error, (errors.RevisionNotFoundError, errors.RemoteEntryNotFoundError)):
        return f"{repository}: the hub no longer has the commit, or a file of it ({reason}); choose another"
    if isinstance(error, errors.RepositoryNotFoundError) or type(error).__name__ == "DatasetNotFoundError":
        return f"{repository}: not on the hub, or private: check the name, or log in with `hf auth login`"
    return f"{repository}: cannot be fetched ({reason}); {remedy}"
