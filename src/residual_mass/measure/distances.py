"""Measures methods on a user's texts with the stages of the studies, and counts what a step reads."""

from __future__ import annotations

import itertools
import json
import math
import platform
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import transformers
from torch import Tensor

from residual_mass import __version__
from residual_mass.benchmarks import fidelity
from residual_mass.benchmarks.force import following, write_forced
from residual_mass.core.selection import retrieved_count
from residual_mass.decode.engine import SharedPrefillEngine
from residual_mass.decode.forced import ForcedDecoder
from residual_mass.decode.packed_prompt import PackedPrompt
from residual_mass.diagnostics.errors import ReadLayer
from residual_mass.diagnostics.packs import visit_layers
from residual_mass.files import read_json, read_parquet, require_writable
from residual_mass.measure.arguments import BASELINE, EMBEDDED, Arguments
from residual_mass.measure.choice import ARM_COLUMNS, is_same, recommended
from residual_mass.measure.documents import Text, read_texts
from residual_mass.measure.models import STUDY, find_device, find_model, load, load_packed
from residual_mass.measure.names import printable, title_of
from residual_mass.measure.served import Served, budgets_of
from residual_mass.measure.times import TIMED_TOKENS, Timer, Times
from residual_mass.measure.weights import weights_cost
from residual_mass.methods import method_named
from residual_mass.methods.step_bytes import bytes_per_verified_token, full_bytes, kept_bytes, step_bytes
from residual_mass.metrics import KL, SAME_TOP
from residual_mass.model.loading import Backbone, load_tokenizer
from residual_mass.model.phi_maps import PhiMaps
from residual_mass.model.rotary import frequencies_of
from residual_mass.provenance import Record, device_name
from residual_mass.recipes import RECIPES
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.columns import FORCED_COLUMNS
from residual_mass.spec.settings import AnchorSpec, MapsSpec
from residual_mass.spec.specs import FidelitySpec, ForceSpec

STORE_NAME = "store.jsonl"
"""Name of the file with the decoded rows of all answers in a folder."""
RESAMPLES = 1000
"""Resamples for the intervals of metrics other than KL, as in the studies."""
TAIL = 1000
"""Minimum number of tokens whose 99.9 % point differs from their largest value."""
QUERIES = 8
"""Number of tokens after a prompt whose reads are counted."""
ARM_OF_TEXT = ["text", *ARM_COLUMNS]
LONGEST_NAME = 200
"""Bytes of an answer's folder name; file systems allow 255."""


@dataclass(frozen=True)
class Measured:
    """What was measured.

    Attributes:
        title: names the model and the prompts.
        folder: of the answer.
        settings: those that repeat the measurement.
        table: a row per text, method and budget: `text`, `method`, `budget_percent` (100 for a cache that is read
            whole); `kl` with the ends `ci_low` and `ci_high` (NaN for a single document) and `kl_over_topk`, over that
            of topk at the same budget; `kl_tail`; `same_top`; `read` and `kept`, the bytes that a step reads and that
            are kept of the prompt, as shares of full attention's in bfloat16; `verified` with `verified_low` and
            `verified_high`, the bytes per verified token in the same unit; each document counts as one draft from the
            exact state, along the given text; `seconds` of a step and `cache_mib`, the MiB of its cache, both over all
            texts; the `backend` that serves the method here; and whether the row is `recommended`, 0 or 1.
        tail: name of the statistic in `kl_tail`.
        served: what serves the methods here.
        times: of what no row has.
        weights: what packed weights cost by text, as `weights_cost` returns it; None for those of the model.
        setup: facts on model, machine and versions, by name.
    """

    args: Arguments
    title: str
    folder: Path
    settings: dict[str, Any]
    texts: list[Text]
    table: pd.DataFrame
    tail: str
    served: Served
    times: Times
    weights: pd.DataFrame | None
    setup: dict[str, str]


class Models:
    """The model that is measured, and the same model as it was loaded; both are loaded on first use."""

    def __init__(self, args: Arguments) -> None:
        self.args = args
        self.device = find_device(args.device)
        self.spec = find_model(args.model, args.assets, self.device)

    @cached_property
    def measured(self) -> Backbone:
        return load_packed(self.spec, self.args, self.device)

    @cached_property
    def loaded(self) -> Backbone:
        return load(self.spec, self.args, self.device)


def measure(args: Arguments) -> Measured:
    """Measures all methods on all texts; rows that an earlier run stored in the folder `out` are not decoded again.

    Raises:
        ValueError: the model, a text, a method or a number is at fault; names it.
        NotFiniteError: the model returns a NaN or an infinity.
    """
    require_writable(args.out / STORE_NAME)
    arms = _arms(args)
    phi = None if args.phi is None else PhiMaps.load(args.phi)
    models = Models(args)
    spec = models.spec
    if 0 < spec.context < args.document_tokens:
        limit = f"{spec.model_id} was made for {spec.context:,}"
        raise ValueError(
            f"--length {args.length}: with what follows, {args.document_tokens:,} tokens, and {limit}; choose a "
            "shorter one"
        )
    tokenizer = load_tokenizer(spec.model_id, spec.revision, spec.source, args.assets)
    texts = read_texts(args, tokenizer)
    further = max(args.document_tokens - args.prompt_tokens, QUERIES, TIMED_TOKENS)
    frequencies_of(models.measured.model).require_growing([args.prompt_tokens], [further])
    served = Served.here(models.measured.model, args, phi)
    settings = _settings(models, served)
    folder = _folder(args, settings)
    require_writable(folder / "settings.json")
    fewest = min(len(text.sequences) for text in texts)
    few = fewest * args.tokens < TAIL
    table = _distances(models, arms, texts, folder, "kl_max" if few else "kl_p99_9", served.packed)
    model = models.measured.model
    reads = [_read(args, text, models.measured, phi, served.packed) for text in texts]
    table = _with_verified_bytes(table.join(pd.concat(reads)), args.tokens)
    weights = None
    if args.weights is not None:
        store = args.out / STORE_NAME
        weights = weights_cost(args, texts, models.loaded, models.measured, store)
    loaded = None if args.weights is None else models.loaded.model
    timer = Timer(args, model, loaded, served, phi)
    documents = [text.sequences[0] for text in texts]
    times = timer.times(documents[0])
    table = table.reset_index().merge(times.arms, on=ARM_COLUMNS)
    choice = recommended(table, args.target_kl, times.faster)
    times = timer.with_choice(times, choice, documents, table)
    table["recommended"] = [int(is_same(choice, row)) for row in table.itertuples()]
    title = title_of(spec.model_id) if args.model == EMBEDDED else args.name
    return Measured(
        args=args,
        title=f"{title}, prompts of {args.length}",
        folder=folder,
        settings=settings,
        texts=texts,
        table=table,
        tail="largest" if few else "99.9 % point",
        served=served,
        times=times,
        weights=weights,
        setup=_setup(models),
    )


def _arms(args: Arguments) -> tuple[ArmSpec, ...]:
    """Returns full attention, and every method at its budgets.

    Raises:
        ValueError: a method is unknown or `full`, or lacks its maps.
    """
    label = None if args.phi is None else args.phi.stem
    arms = [ArmSpec("full")]
    for name in args.methods:
        rule = method_named(name)
        if rule.whole_prefix:
            raise ValueError(f"--methods: {name} is what the others are compared with; leave it out")
        if rule.needs_maps and label is None:
            raise ValueError(f"--methods: {name} needs feature maps of this model; pass their file to --phi")
        maps = label if rule.needs_maps else None
        arms += [ArmSpec(name, budget, maps) for budget in budgets_of(args, name)]
    return tuple(arms)


def _settings(models: Models, served: Served) -> dict[str, Any]:
    """Returns what determines an answer, as JSON has it."""
    spec = models.spec
    args = models.args
    settings = dict(vars(args))
    for name in ("device", "assets", "out"):
        del settings[name]
    settings |= {"model": spec.model_id, "revision": spec.revision, "dtype": spec.dtype}
    settings |= {"texts": [*map(printable, args.texts)], "served": served.backends}
    return json.loads(json.dumps(settings, default=str))


def _setup(models: Models) -> dict[str, str]:
    """Returns what an answer stands on beside its texts: model, weights, machine and versions."""
    spec = models.spec
    model = models.measured.model
    weights = spec.dtype
    if models.args.weights is not None:
        weights = f"{model.packed_weights}; all others {str(model.dtype).removeprefix('torch.')}"
    versions = {"residual-mass": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    versions["Python"] = platform.python_version()
    shown_versions = [f"{name} {version}" for name, version in versions.items()]
    return {
        "model": f"{spec.model_id}, {spec.revision}",
        "weights": weights,
        "machine": device_name(models.device),
        "versions": ", ".join(shown_versions),
    }


def _folder(args: Arguments, settings: dict[str, Any]) -> Path:
    """Returns a folder named after model, texts and length, with a number if other settings have that folder."""
    texts = [Path(title_of(text)).stem for text in args.texts]
    name = "-".join((args.name, *texts, args.length))[:80]
    name = name.encode()[:LONGEST_NAME].decode(errors="ignore")
    for number in itertools.count(1):
        folder = args.out / (name if number == 1 else f"{name}-{number}")
        earlier = folder / "settings.json"
        if not earlier.exists() or read_json(earlier) == settings:
            return folder


def _distances(
    models: Models, arms: tuple[ArmSpec, ...], texts: Sequence[Text], folder: Path, tail: str, packed: Collection[str]
) -> pd.DataFrame:
    """Forces the texts and computes distances, both by the stages of the studies.

    Returns:
        By ARM_OF_TEXT, the columns of `Measured.table` up to `same_top`, and the rates of first differences, in the
        columns `verified` to `verified_high`.
    """
    args = models.args
    maps = {}
    maps_specs: tuple[MapsSpec, ...] = ()
    if args.phi is not None:
        maps[args.phi.stem] = args.phi
        maps_specs = (MapsSpec(args.phi.stem, args.prompt_tokens),)
    force_spec = ForceSpec(
        study=STUDY,
        backbone=models.spec,
        length=args.length,
        corpora=(),
        documents=args.documents,
        tokens=args.tokens,
        seed=args.seed,
        asked=(),
        arms=arms,
        arms_of_documents=(),
        anchors=AnchorSpec(),
        truncate_to=args.length,
        maps=maps_specs,
        recipe=RECIPES["force"],
    )
    forced = folder / "forced.parquet"
    out = folder / "fidelity.csv"
    store = args.out / STORE_NAME
    record = Record("force", force_spec, [])
    documents = []
    for text in texts:
        documents += following(force_spec, text.name, text.sequences, force_spec.rows_of_answer)
    identity = models.measured.identity
    facts = write_forced(force_spec, documents, identity, lambda: models.measured, maps, store, forced, packed)
    record.write(forced, identity=identity, **facts)
    fidelity_spec = FidelitySpec(
        study=STUDY,
        backbone=models.spec,
        length=args.length,
        recipe=RECIPES["fidelity"],
        bootstrap_resamples=RESAMPLES,
        seed=args.seed,
    )
    fidelity.run(fidelity_spec, forced, out)
    table = _kl_table(args, force_spec.anchors, out, tail)
    return table.join(_first_differences(args, forced))


def _kl_table(args: Arguments, anchors: AnchorSpec, result: Path, tail: str) -> pd.DataFrame:
    """Returns the columns of `Measured.table` up to `same_top`, by ARM_OF_TEXT, of the stage `fidelity`."""
    # A text may be called NA or null.
    rows = pd.read_csv(result, dtype={"text": str}, keep_default_na=False, na_values=[""])
    rows = rows.query("method != 'full'").set_index(ARM_OF_TEXT)
    by_metric = dict(iter(rows.groupby("metric")))
    table = by_metric[KL.name][["value", "ci_low", "ci_high"]].rename(columns={"value": "kl"})
    table["kl_tail"] = by_metric[tail]["value"]
    table["same_top"] = by_metric[SAME_TOP.name]["value"]
    fixed = anchors.sink + anchors.tail
    middle = max(args.prompt_tokens - fixed, 0)
    ks = {budget: retrieved_count(budget, args.prompt_tokens, fixed) for budget in args.budgets}
    partial = [budget for budget, k in ks.items() if k < middle]
    baseline = table["kl"].xs(BASELINE, level="method")
    budgets = baseline.index.get_level_values("budget_percent")
    baseline = baseline.where((baseline > 0) & budgets.isin(partial))
    ratio = table["kl"] / table.index.droplevel("method").map(baseline)
    methods = table.index.get_level_values("method")
    whole = [method_named(name).selector.replaces_cache for name in methods]
    return table.assign(kl_over_topk=ratio.mask(whole))


def _first_differences(args: Arguments, forced: Path) -> pd.DataFrame:
    """Returns the rates of first differences by ARM_OF_TEXT."""
    drafts = read_parquet(forced, FORCED_COLUMNS, "force").query("method != 'full'")
    drafts = drafts.assign(first=drafts["same_top"]).groupby("text")
    rates = []
    for name, part in drafts:
        of_text = fidelity.first_differences(part, RESAMPLES, args.seed)
        rates.append(of_text.assign(text=name))
    ends = {"value": "verified", "ci_low": "verified_low", "ci_high": "verified_high"}
    return pd.concat(rates).set_index(ARM_OF_TEXT).rename(columns=ends)[[*ends.values()]]


def _with_verified_bytes(table: pd.DataFrame, tokens: int) -> pd.DataFrame:
    """Replaces rates of first differences by the bytes per verified token, of drafts of so many tokens."""
    table = table.copy()
    for name in ("verified", "verified_low", "verified_high"):
        sizes = []
        for read, rate in zip(table["read"], table[name], strict=True):
            size = rate
            if not math.isnan(rate):
                size, *_ = bytes_per_verified_token(read, rate, tokens)
            sizes.append(size)
        table[name] = sizes
    return table


def _read(
    args: Arguments, text: Text, backbone: Backbone, phi: PhiMaps | None, packed: Collection[str]
) -> pd.DataFrame:
    """Returns `read` and `kept` for the first document's prompt, of packed caches as they are. For other methods, the
    tokens read are means over layers, heads and queries, which hardly vary between documents.
    """
    length = args.prompt_tokens
    anchors = AnchorSpec()
    folded = None if phi is None else phi.on(backbone.model).folded()
    counts: dict[str, list[Tensor]] = {}
    for method in args.methods:
        if method not in packed:
            counts[method] = []

    def visit(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> None:
        of_layer = None if folded is None else folded[layer]
        read = ReadLayer(queries, keys, values, scale, args.budgets, anchors, of_layer)
        for method in counts:
            tokens_read = read.errors(method)["tokens_read"]
            counts[method].append(tokens_read.double().mean((0, 1)))  # [B]

    document = text.sequences[0]
    visit_layers(backbone, document[: length + QUERIES], length, visit, hybrid=True)
    shape = backbone.shape
    fixed = anchors.sink + anchors.tail
    features = 0 if phi is None else phi.map.d_phi
    step = shape.step(length, anchors=fixed, features=features)
    full = full_bytes(step)
    of_packed = _read_packed(args, document, backbone, full, packed)
    rows = [(text.name, *row) for row in of_packed]
    for method, by_layer in counts.items():
        rule = method_named(method)
        # A cache that is read whole reads as much at every budget.
        means = torch.stack(by_layer).mean(0).tolist()
        for budget, tokens in zip(budgets_of(args, method), means, strict=False):
            size = step_bytes(rule, step._replace(retrieved=tokens - fixed)).total
            kept = kept_bytes(rule, step).total
            rows.append((text.name, method, budget, size / full, kept / full))
    return pd.DataFrame(rows, columns=[*ARM_OF_TEXT, "read", "kept"]).set_index(ARM_OF_TEXT)


def _read_packed(
    args: Arguments, document: Sequence[int], backbone: Backbone, full: int, packed: Collection[str]
) -> Iterator[tuple[str, float, float, float]]:
    """Yields method, budget, `read` of the first step after a prompt, and `kept` before it, of layers without a window.

    Args:
        full: bytes of full attention for a KV head and layer.
    """
    arms = [ArmSpec(method, budget) for method in packed for budget in budgets_of(args, method)]
    if not arms:
        return
    length = args.prompt_tokens
    shape = backbone.shape
    engine = SharedPrefillEngine(backbone, arms, AnchorSpec(), None, length)
    prompt = PackedPrompt(ForcedDecoder(engine, document[:length]))
    for arm in arms:
        cache = prompt.cache(arm)
        layers = [layer.packed for layer in cache.packed_layers]
        kept = sum(layer.bytes for layer in layers)
        prompt.logits(arm, document[length : length + 1], cache)
        read = sum(layer.read_bytes(shape.group) for layer in layers)
        whole = full * shape.kv_heads * len(layers)
        yield arm.method, arm.budget_percent, read / whole, kept / whole
