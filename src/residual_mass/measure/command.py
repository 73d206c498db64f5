"""The sub-command `measure`, from top to bottom: reads models and texts, measures, prints the answer and writes it."""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from residual_mass import __version__
from residual_mass.files import read_json, require_writable, sha256_of
from residual_mass.measure.request import EMBEDDED, STORE_NAME, Request, printable, title_of

if TYPE_CHECKING:  # the command line, which imports this module, does without torch and pandas
    from transformers import PreTrainedModel

    from residual_mass.measure.answer import Measured
    from residual_mass.measure.models import Served
    from residual_mass.model.loading import Backbone
    from residual_mass.spec.specs import BackboneSpec

LATE = ("accelerate", "gguf", "jinja2", "matplotlib")
"""Packages of the extra `measure` that are needed only after the measurement or by other libraries; checked first."""
LONGEST_NAME = 200
"""Bytes of an answer's folder name; file systems allow 255."""


def run(options: argparse.Namespace) -> None:
    """Measures, prints the answer and writes it to a folder in `--out`; interrupted, it resumes."""
    for package in LATE:
        import_module(package)
    request = Request.of(options)
    from residual_mass.measure import answer, page

    measured = measure(request)
    said = answer.answer_of(measured)
    text = page.terminal_text(measured, said)
    files = page.write(measured, said, text)
    encoding = sys.stdout.encoding or "utf-8"
    for line in (text, *map(str, files)):
        print(line.encode(encoding, "backslashreplace").decode(encoding))  # escapes for what a terminal lacks


def measure(request: Request) -> Measured:
    """Measures all methods on all texts; distances that an earlier run stored in the folder `out` are not computed
    again.

    Raises:
        ValueError: the model, a text, a method or a number is at fault; names it.
    """
    import pandas as pd

    from residual_mass.benchmarks.store import RowStore
    from residual_mass.measure import answer, distances, models, texts, times
    from residual_mass.model.loading import load_tokenizer
    from residual_mass.model.phi_maps import PhiMaps
    from residual_mass.model.rotary import frequencies_of

    store_file = request.out / STORE_NAME
    require_writable(store_file)
    phi = None if request.phi is None else PhiMaps.load(request.phi)
    phi_sha = None if request.phi is None else sha256_of(request.phi)

    # The model and its texts.
    device = models.find_device(request.device)
    spec = models.find_model(request.model, request.assets, device)
    require_length(request, spec)
    tokenizer = load_tokenizer(spec.model_id, spec.revision, spec.source, request.assets)
    documents = texts.read_texts(request, tokenizer)
    backbone = models.load(spec, request, device, request.weights)
    model = backbone.model
    further = max(request.document_tokens - request.prompt_tokens, distances.QUERIES, times.TIMED_TOKENS)
    frequencies_of(model).require_growing([request.prompt_tokens], [further])
    require_positions(request, model, further)
    served = models.served_here(model, request, phi)
    settings = settings_of(request, spec, served)
    folder = folder_of(request, settings)
    require_writable(folder / "settings.json")

    # How far methods are from full attention, and what their steps read.
    tail, share = distances.tail_of(request, documents)
    loaded = None if request.weights is None else models.load(spec, request, device, None)
    weights = None
    with RowStore(store_file, distances.ROW_FIELDS) as store:
        tokens = distances.token_distances(request, backbone, documents, served.sides, phi_sha, store)
        if loaded is not None:
            weights = distances.weights_cost(request, documents, loaded, backbone, store)
    reads = [distances.bytes_of_steps(request, backbone, text, served.sides, phi) for text in documents]
    table = distances.summary(request, tokens, share).join(pd.concat(reads)).reset_index()

    # How long a step takes, and which arm to take.
    prompt = documents[0].sequences[0][: request.prompt_tokens]
    timed = times.times_of(model, None if loaded is None else loaded.model, served, prompt)
    table = table.join(timed.steps, on=distances.ARM_COLUMNS)
    choice = answer.recommended(table, request.target_kl, timed.faster)
    table["recommended"] = 0
    if choice is not None:
        table["recommended"] = (table[distances.ARM_COLUMNS] == choice[distances.ARM_COLUMNS]).all(axis=1).astype(int)
        selecting = answer.selecting(table, request.target_kl, choice)
        side = None if selecting is None else served.side(selecting.method, selecting.budget_percent)
        timed = times.with_longer(timed, model, served, request.prompt_tokens, side)

    title = title_of(spec.model_id) if request.model == EMBEDDED else request.name
    return answer.Measured(
        request=request,
        title=f"{title}, prompts of {request.length}",
        folder=folder,
        settings=settings,
        texts=documents,
        tokens=tokens,
        table=table,
        tail=tail,
        refusals=served.refusals,
        times=timed,
        weights=weights,
        setup=setup_of(request, backbone),
    )


def require_length(request: Request, spec: BackboneSpec) -> None:
    """Raises ValueError if documents are longer than the texts that the model was made for."""
    if 0 < spec.context < request.document_tokens:
        limit = f"{spec.model_id} was made for {spec.context:,}"
        raise ValueError(
            f"--length {request.length}: with what follows, {request.document_tokens:,} tokens, and {limit}; choose a "
            "shorter one"
        )


def require_positions(request: Request, model: PreTrainedModel, further: int) -> None:
    """Raises ValueError unless a model has positions for a prompt and what is read after it.

    Args:
        further: most tokens that are read after a prompt, also while its steps are timed.
    """
    from residual_mass.measure import times

    positions = times.positions_of(model)
    needed = request.prompt_tokens + further
    if needed > positions:
        room = f"{type(model).__name__} has positions for {positions:,}"
        fitting = positions - further
        remedy = f"choose --length {fitting} or a shorter one" if fitting > 0 else "take another model"
        raise ValueError(
            f"--length {request.length}: with what follows, also while steps are timed, {needed:,} tokens, and {room}; "
            f"{remedy}"
        )


def settings_of(request: Request, spec: BackboneSpec, served: Served) -> dict[str, Any]:
    """Returns what determines an answer, as JSON has it."""
    settings = dict(vars(request))
    for name in ("device", "assets", "out"):
        del settings[name]
    settings |= {"model": spec.model_id, "revision": spec.revision, "dtype": spec.dtype}
    settings |= {"texts": [*map(printable, request.texts)], "served": served.backends}
    return json.loads(json.dumps(settings, default=str))


def folder_of(request: Request, settings: dict[str, Any]) -> Path:
    """Returns a folder named after model, texts and length, with a number if other settings have that folder."""
    texts = [Path(title_of(text)).stem for text in request.texts]
    name = "-".join((request.name, *texts, request.length))[:80]
    name = name.encode()[:LONGEST_NAME].decode(errors="ignore")
    for number in itertools.count(1):
        folder = request.out / (name if number == 1 else f"{name}-{number}")
        earlier = folder / "settings.json"
        if not earlier.exists() or read_json(earlier) == settings:
            return folder


def setup_of(request: Request, backbone: Backbone) -> dict[str, str]:
    """Returns what an answer stands on beside its texts: model, weights, machine and versions."""
    import torch
    import transformers

    from residual_mass.provenance import device_name

    spec = backbone.spec
    weights = spec.dtype
    if hasattr(backbone.model, "packed_weights"):
        dtype = str(backbone.model.dtype).removeprefix("torch.")
        weights = f"{backbone.model.packed_weights}; all others {dtype}"
    versions = {"residual-mass": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    versions["Python"] = platform.python_version()
    return {
        "model": f"{spec.model_id}, {spec.revision}",
        "weights": weights,
        "machine": device_name(backbone.device),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
