"""Measures methods on a user's texts with the stages of the studies, counts what a step reads, and times it."""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import json
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from transformers import DynamicCache

from residual_mass.backbones.loading import Backbone, backbone_identity, load_tokenizer
from residual_mass.backbones.method_errors import ReadLayer
from residual_mass.backbones.partial import partial_kv
from residual_mass.backbones.phi_maps import PhiMaps
from residual_mass.benchmarks import fidelity
from residual_mass.benchmarks.columns import FIDELITY
from residual_mass.benchmarks.force import following, write_forced
from residual_mass.core.settings import AnchorSpec, MapsSpec, tokens_of
from residual_mass.diagnostics.packs import visit_layers
from residual_mass.files import read_csv, read_json, require_writable
from residual_mass.measure import command, inputs
from residual_mass.measure.inputs import Text
from residual_mass.methods import Step, method_named
from residual_mass.methods.arms import ArmSpec, percent_written
from residual_mass.methods.step_bytes import full_bytes, kept_bytes, step_bytes
from residual_mass.metrics import KL, SAME_TOP
from residual_mass.provenance import Record
from residual_mass.recipes import RECIPES
from residual_mass.study.specs import BackboneSpec, FidelitySpec, ForceSpec

BASELINE = "topk"
"""What the others are given over."""
DEFAULT_TEXTS = ("wiki", "code")
RESAMPLES = 1000
"""Behind the intervals of other metrics than KL, as in the studies."""
TAIL = 1000
"""Fewest tokens whose 99.9 % point is not just their largest value."""
QUERIES = 8
"""Tokens after a prompt whose queries are counted."""
STEPS = 6
"""Decode steps that are timed, after one that is not."""


@dataclass(frozen=True)
class Asked:
    """The flags of the command; budgets in percent of the prompt, anchors included."""

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
    assets: Path
    out: Path

    @classmethod
    def of(cls, options: argparse.Namespace) -> Asked:
        """Raises ValueError for a number out of range, or a budget that is more likely a share."""
        for name in ("documents", "tokens"):
            if getattr(options, name) < 1:
                raise ValueError(f"--{name} is {getattr(options, name)}, not 1 or more")
        if not 0 < options.target_kl < float("inf"):
            raise ValueError(f"--target-kl is {options.target_kl:g}; write a distance above 0 in nats, such as 0.01")
        given = {name: getattr(options, name) for name in cls.__dataclass_fields__}
        if inputs.is_text(options.model):
            given |= {"model": command.EMBEDDED, "texts": [options.model, *options.texts]}
        of_checkout = Path("results", "assets")
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        given["assets"] = options.assets or (
            of_checkout if of_checkout.is_dir() else cache / "residual-mass" / "assets"
        )
        given["texts"] = tuple(dict.fromkeys(given["texts"] or DEFAULT_TEXTS))
        given["methods"] = tuple(dict.fromkeys((BASELINE, *options.methods)))
        given["budgets"] = tuple(dict.fromkeys(map(percent_written, options.budgets)))
        return cls(**given)

    @property
    def length_in_tokens(self) -> int:
        return tokens_of(self.length)

    @property
    def document_tokens(self) -> int:
        """A prompt, the token after it, and the continuation."""
        return self.length_in_tokens + 1 + self.tokens


@dataclass(frozen=True)
class Measured:
    """What was measured.

    Attributes:
        folder: of the answer.
        settings: what has to be asked for again to measure the same.
        table: a row per text, method and budget: `text`, `method`, `budget_percent`; `kl` with the ends `ci_low` and
            `ci_high` (NaN for a single document) and `kl_over_topk`, over that of topk at the same budget; `kl_tail`;
            `same_top`; `read` and `kept`, bytes that a step reads and that are kept of the prompt, in units of full
            attention's in bfloat16.
        tail: what `kl_tail` is.
        seconds: of a decode step, by method, and `full` for the model's own attention.
    """

    asked: Asked
    backbone: BackboneSpec
    folder: Path
    settings: dict[str, Any]
    texts: list[Text]
    table: pd.DataFrame
    tail: str
    seconds: dict[str, float]


def measure(asked: Asked) -> Measured:
    """Measures all methods on all texts; what an earlier run decoded for the same folder `out` is not decoded again.

    Raises:
        ValueError: the model, a text, a method or a number is at fault; names it.
        NotFiniteError: the model returns a NaN or an infinity.
    """
    store = asked.out / "store.jsonl"
    require_writable(store)
    arms, device = _arms(asked), inputs.find_device(asked.device)
    phi = None if asked.phi is None else PhiMaps.load(asked.phi)
    backbone = inputs.find_model(asked.model, asked.assets, device)
    spec = _spec(asked, backbone, arms)
    tokenizer = load_tokenizer(backbone.model_id, backbone.revision, backbone.source, asked.assets)
    texts = inputs.read_texts(asked.texts, asked.assets, tokenizer, asked.document_tokens, asked.documents, asked.seed)
    load = functools.cache(lambda: inputs.load_model(backbone, asked.assets, device))
    settings = {name: value for name, value in vars(asked).items() if name not in ("device", "assets", "out")}
    settings |= {"model": backbone.model_id, "revision": backbone.revision, "dtype": backbone.dtype}
    settings = json.loads(json.dumps(settings, default=str))
    folder = _folder(asked, settings)

    forced, distances = folder / "forced.parquet", folder / "fidelity.csv"
    record = Record("force", spec, [])
    documents = [each for text in texts for each in following(spec, text.name, text.sequences, spec.rows_of_answer)]
    identity = backbone_identity(backbone, asked.assets)
    maps = {} if asked.phi is None else {asked.phi.stem: asked.phi}
    facts = write_forced(spec, documents, identity, load, maps, store, forced)
    record.write(forced, identity=identity, **facts)
    about = FidelitySpec(
        study=inputs.STUDY, backbone=backbone, length=asked.length, recipe=RECIPES["fidelity"],
        bootstrap_resamples=RESAMPLES, seed=asked.seed,
    )  # fmt: skip
    fidelity.run(about, forced, distances)

    tail, name = "kl_p99_9", "99.9 % point"
    if min(len(text.sequences) for text in texts) * asked.tokens < TAIL:
        tail, name = "kl_max", "largest"
    read = pd.concat([_read(asked, text, load(), spec.anchors, phi) for text in texts])
    table = _distances(distances, tail).merge(read, on=["text", "method", "budget_percent"])
    seconds = _seconds(asked, load(), texts[0].sequences[0], phi)
    return Measured(asked, backbone, folder, settings, texts, table, name, seconds)


def _arms(asked: Asked) -> tuple[ArmSpec, ...]:
    """Full attention, and every method at every budget.

    Raises:
        ValueError: a method is unknown or `full`, or lacks its maps.
    """
    label = None if asked.phi is None else asked.phi.stem
    rules = [method_named(name) for name in asked.methods]
    for rule in rules:
        if rule.whole_prefix:
            raise ValueError(f"--methods: {rule.name} is what the others are compared with; leave it out")
        if rule.needs_maps and label is None:
            raise ValueError(f"--methods: {rule.name} needs feature maps of this model; pass their file to --phi")
    partial = (
        ArmSpec(rule.name, budget, label if rule.needs_maps else None) for rule in rules for budget in asked.budgets
    )
    return ArmSpec("full"), *partial


def _spec(asked: Asked, backbone: BackboneSpec, arms: tuple[ArmSpec, ...]) -> ForceSpec:
    if 0 < backbone.context < asked.document_tokens:
        raise ValueError(
            f"--length {asked.length}: with what follows, {asked.document_tokens:,} tokens, and {backbone.model_id} "
            f"was made for {backbone.context:,}; choose a shorter one"
        )
    maps = () if asked.phi is None else (MapsSpec(asked.phi.stem, asked.length_in_tokens),)
    return ForceSpec(
        study=inputs.STUDY, backbone=backbone, length=asked.length, corpora=(), documents=asked.documents,
        tokens=asked.tokens, seed=asked.seed, asked=(), arms=arms, arms_of_documents=(), anchors=AnchorSpec(),
        truncate_to=asked.length, maps=maps, recipe=RECIPES["force"],
    )  # fmt: skip


def _folder(asked: Asked, settings: dict[str, Any]) -> Path:
    """A folder named after model, texts and length; a number tells answers to other settings apart."""
    names = (Path(asked.model).name, *(Path(name).stem for name in asked.texts), asked.length)
    for number in itertools.count(1):
        folder = asked.out / ("-".join(names)[:80] + (f"-{number}" if number > 1 else ""))
        answer = folder / "settings.json"
        if not answer.exists() or read_json(answer) == settings:
            return folder
    raise AssertionError


def _distances(file: Path, tail: str) -> pd.DataFrame:
    """The columns of `Measured.table` that stand in a fidelity CSV."""
    rows = pd.DataFrame(read_csv(file, FIDELITY, "measure")).query("method != 'full'")
    rows["budget_percent"] = rows["budget_percent"].astype(float)
    numbers = ["value", "ci_low", "ci_high"]
    rows[numbers] = rows[numbers].apply(pd.to_numeric)
    key = ["text", "method", "budget_percent"]
    found = rows[rows["metric"] == KL.name].set_index(key)[numbers].rename(columns={"value": "kl"})
    for column, metric in {"kl_tail": tail, "same_top": SAME_TOP.name}.items():
        found[column] = rows[rows["metric"] == metric].set_index(key)["value"]
    baseline = found["kl"].xs(BASELINE, level="method")
    found["kl_over_topk"] = found["kl"] / found.index.droplevel("method").map(baseline)
    return found.reset_index()


def _read(asked: Asked, text: Text, backbone: Backbone, anchors: AnchorSpec, phi: PhiMaps | None) -> pd.DataFrame:
    """What a step reads of the first document's prompt; tokens that it reads are means over layers, heads and queries,
    and hardly vary between documents.
    """
    folded, length = None if phi is None else phi.on(backbone.device).folded(), asked.length_in_tokens
    counts: dict[str, list[Tensor]] = {method: [] for method in asked.methods}

    def visit(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> None:
        tensors = queries.float(), keys.float(), values.float()
        layer_read = ReadLayer(*tensors, scale, asked.budgets, anchors, None if folded is None else folded[layer])
        for method in asked.methods:
            counts[method].append(layer_read.errors(method)["tokens_read"].double().mean((0, 1)))  # [B]

    visit_layers(backbone, text.sequences[0][: length + QUERIES], length, visit, hybrid=True)
    shape, fixed = backbone.shape, anchors.sink + anchors.tail
    step = Step(length, shape.head_dim, shape.query_heads // shape.kv_heads, fixed, 0)
    step = step if phi is None else step._replace(features=phi.map.d_phi)
    rows = []
    for method, by_layer in counts.items():
        for budget, tokens in zip(asked.budgets, torch.stack(by_layer).mean(0).tolist(), strict=True):
            rule, full = method_named(method), full_bytes(step)
            size = step_bytes(rule, step._replace(retrieved=tokens - fixed)).total
            rows.append((text.name, method, budget, size / full, kept_bytes(rule, step).total / full))
    return pd.DataFrame(rows, columns=["text", "method", "budget_percent", "read", "kept"])


@torch.no_grad()
def _seconds(asked: Asked, backbone: Backbone, document: Sequence[int], phi: PhiMaps | None) -> dict[str, float]:
    """Seconds of a decode step after one prompt, of the model's own attention (`full`) and of every method under
    `partial_kv` at the largest budget: the fastest of STEPS, because other work only slows steps. The first one, which
    summarises the prompt, is left out.
    """
    model, length = backbone.model, asked.length_in_tokens
    ids = torch.tensor([list(document)], device=backbone.device)
    prompt = DynamicCache(config=model.config)
    model(ids[:, : length - 2], past_key_values=prompt, logits_to_keep=1)
    found = {}
    for method in ("full", *asked.methods):
        cache, steps = copy.deepcopy(prompt), []
        maps = phi if method_named(method).needs_maps else None
        under = nullcontext() if method == "full" else partial_kv(model, method, max(asked.budgets) / 100, maps)
        with under:
            model(ids[:, length - 2 : length], past_key_values=cache)
            for step in range(STEPS + 1):
                newest = ids[:, [min(length + step, ids.shape[1] - 1)]]
                start = time.perf_counter()
                model(newest, past_key_values=cache).logits.sum().item()  # waits for a GPU
                steps.append(time.perf_counter() - start)
        found[method] = min(steps[1:])
    return found
