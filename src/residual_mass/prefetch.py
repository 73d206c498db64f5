"""Everything that a study reads of the hub, fetched into its assets folder; and what such a folder lacks.

Models and the parts of data sets that benchmarks use are fetched whole. Of a training corpus come the shards that the
study's trainings will read: in the order in which they read them, until their documents hold the tokens that are wanted
and MARGIN more. The count of a document's tokens is estimated from its characters; the order of shards and documents is
the streams' own, so sequences are the same offline as online.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import logging
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from residual_mass.assets import MANIFEST as ASSETS_MANIFEST
from residual_mass.benchmarks.catalogue import tasks_of
from residual_mass.files import claimed, read_json, sha256_of, write_json
from residual_mass.hub_data import BABILONG, ESSAYS, HUB, LONGBENCH, REVISIONS, STREAMED, HubPart
from residual_mass.hub_folder import REMEDY, HubFolder, Kind, key_of
from residual_mass.specs import ModelNeed, PrefetchSpec, StreamNeed, tokens_of

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile

log = logging.getLogger(__name__)

MODEL_FILES = (
    "model*.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json", "tokenizer*",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template*", "LICENSE*", "NOTICE*",
    "USE_POLICY*",
)  # fmt: skip
"""Of a model's repository; patterns of names in its top folder."""
REPO_TYPES: dict[Kind, str] = {"models": "model", "data_sets": "dataset"}
MARGIN = 1.1
"""More text than is wanted, as tokens are estimated."""
SAMPLED, BATCH = 16, 1000
"""So many documents of each batch are tokenised, to learn how many tokens a character of this shard makes."""
BYTES_PER_TOKEN = 3
"""Of compressed text, roughly: for the estimate before anything is read."""
TYPICAL_TOKENS = 1000
"""Of a document, for the same estimate."""
GB = 1e9


# ---- what jobs need --------------------------------------------------------------------------------------------------


def needs_of(study: str, specs: Iterable[dict[str, Any]]) -> PrefetchSpec:
    """What jobs read of the hub.

    Args:
        specs: what the jobs are told, as parsed JSON; those of other stages need nothing.
    """
    models: dict[ModelNeed, None] = {}
    parts: dict[HubPart, None] = {}
    streams: dict[tuple[Any, ...], StreamNeed] = {}
    for spec in specs:
        backbone = spec.get("backbone")
        if isinstance(backbone, dict) and backbone["source"] == "hub":
            models[ModelNeed(backbone["model_id"], backbone["revision"])] = None
        if spec.get("tokenizer_source") == "hub":
            models[ModelNeed(spec["model_id"], spec["revision"])] = None
        if "tokenizer_source" in spec and spec["data_source"] == "hub":
            parts |= dict.fromkeys(benchmark_parts(spec["benchmark"], tokens_of(spec["length"])))
        texts = [*spec.get("held_out", []), *([spec["corpus"]] if backbone and "corpus" in spec else [])]
        parts |= dict.fromkeys(HUB[name].part for name in texts if name in HUB)
        for need in stream_needs(spec) if "corpora" in spec else ():
            known = streams.setdefault(_same_order(asdict(need)), need)
            streams[_same_order(asdict(need))] = max(known, need, key=lambda one: one.tokens)
    return PrefetchSpec(study, tuple(models), tuple(parts), tuple(streams.values()))


def benchmark_parts(benchmark: str, length: int) -> list[HubPart]:
    """What the benchmark's own data are, at a length in tokens."""
    tasks = [task.removeprefix(f"{benchmark}_") for task in tasks_of(benchmark, length)]
    if benchmark == "babilong":
        return [HubPart(BABILONG, f"{length // 1024}k", task) for task in tasks]
    return [HubPart(LONGBENCH, task, "test") for task in tasks] if benchmark == "longbench" else [ESSAYS]


def stream_needs(train: dict[str, Any]) -> Iterator[StreamNeed]:
    """How far one training reads into each of its streamed corpora, as its spec (parsed JSON) says."""
    steps, replay, corpora = train["steps"], train["replay"], train["corpora"]
    passes = steps if replay == {"pool": 1, "reuse": 1} else (steps - 1) // replay["reuse"] + 1
    owner = {key: train["backbone"][key] for key in ("tokenizer", "model_id", "revision", "source")}
    for place, name in enumerate(corpora):
        sequences = math.ceil((passes - place) / len(corpora))
        if name in STREAMED and sequences > 0:
            tokens = sequences * tokens_of(train["length"])
            yield StreamNeed(name, **owner, seed=train["seed"], slots=train["sequences_per_step"], tokens=tokens)


# ---- what a folder lacks ---------------------------------------------------------------------------------------------


def problems(needs: PrefetchSpec, assets: Path) -> list[str]:
    """One line with everything that a folder lacks for a run without network; empty where it lacks nothing.

    Files are looked at, not read: their sha256 is checked when they are used.
    """
    lacking = [*_asset_problems(assets), *_hub_problems(needs, HubFolder(assets))]
    return [f"offline, and the assets folder lacks: {'; '.join(lacking)}: {REMEDY}"] if lacking else []


def _asset_problems(assets: Path) -> Iterator[str]:
    """Of the files out of pinned wheels, which every study needs."""
    manifest = assets / ASSETS_MANIFEST
    if not manifest.is_file():
        yield f"{manifest}: no such file"
        return
    yield from (f"{assets / entry['path']}: no such file" for entry in read_json(manifest)["files"]
                if not (assets / entry["path"]).is_file())  # fmt: skip


def _hub_problems(needs: PrefetchSpec, hub: HubFolder) -> Iterator[str]:
    content = hub.content()
    for model in needs.models:
        entry = content["models"].get(model.model_id)
        if entry is None or entry["revision"] != model.revision:
            yield f"model {model.model_id} at {model.revision}"
            continue
        problems = (hub.problem("models", model.model_id, entry, name) for name in entry["files"])
        yield from filter(None, problems)
    for part in needs.parts:
        yield from _part_problems(part, hub, content)
    for need in needs.streams:
        part = HUB[need.corpus].part
        held = content["data_sets"].get(part.data_set, {"parts": {}})["parts"].get(key_of(part))
        if held is None or not _covers(held, need):
            yield (
                f"corpus {need.corpus}: {need.tokens:,} tokens of it for seed {need.seed} and {need.slots} sequences "
                f"per step, as the tokenizer {need.tokenizer} counts them"
            )
        else:
            yield from _part_problems(part, hub, content)


def _part_problems(part: HubPart, hub: HubFolder, content: dict[str, Any]) -> Iterator[str]:
    entry = content["data_sets"].get(part.data_set)
    if entry is None or key_of(part) not in entry["parts"]:
        yield f"data set {part}"
    elif REVISIONS.get(part.data_set, entry["revision"]) != entry["revision"]:
        yield f"data set {part} at {REVISIONS[part.data_set]}"
    else:
        names = entry["parts"][key_of(part)]["files"].values()
        yield from filter(None, (hub.problem("data_sets", part.data_set, entry, name) for name in names))


def _covers(held: dict[str, Any], need: StreamNeed) -> bool:
    """Whether what was fetched of a corpus reaches as far as a training reads."""
    alike = [one["tokens"] for one in held.get("streams", []) if _same_order(one) == _same_order(asdict(need))]
    return max(alike, default=0) >= need.tokens


def _same_order(stream: dict[str, Any]) -> tuple[Any, ...]:
    """What tells trainings apart that read different documents of a corpus, or other tokens of them."""
    return tuple(stream[key] for key in ("corpus", "tokenizer", "seed", "slots"))


# ---- fetching --------------------------------------------------------------------------------------------------------


def run(spec: PrefetchSpec, assets: Path) -> None:
    """The `prefetch` stage: brings what is missing into the folder, or without network says what that is.

    Files that are there with the right sha256 stay, and one that was interrupted goes on where it stopped.

    Raises:
        ValueError: something cannot be had, or does not fit on the disk; in one line.
    """
    from huggingface_hub.constants import HF_HUB_OFFLINE

    hub = HubFolder(assets)
    if HF_HUB_OFFLINE:
        wrong = [*_altered(assets), *_damaged(hub)]
        told = [f"{file}: not the file that its manifest vouches for (sha256)" for file in wrong]
        if lacking := [*problems(spec, assets), *(f"{each}; {REMEDY}" for each in told)]:
            raise ValueError("; ".join(lacking))
        log.info("%s holds everything that study %s reads, and every sha256 is right", assets, spec.study)
        return
    with claimed(hub.manifest):
        Fetcher(hub).fetch(spec)
    log.info("%s holds everything that study %s reads", assets, spec.study)


def _altered(assets: Path) -> Iterator[Path]:
    """Files out of wheels that are not those that their manifest vouches for; a missing one is none of them."""
    if (assets / ASSETS_MANIFEST).is_file():
        for entry in read_json(assets / ASSETS_MANIFEST)["files"]:
            path = assets / entry["path"]
            if path.is_file() and sha256_of(path) != entry["sha256"]:
                yield path


def _damaged(hub: HubFolder) -> Iterator[Path]:
    """Files that are not those that the manifest vouches for; a missing one is none of them."""
    for kind, repositories in hub.content().items():
        for name, entry in repositories.items():
            for file, facts in entry["files"].items():
                path = hub.file(kind, name, file)
                if path.is_file() and sha256_of(path) != facts["sha256"]:
                    yield path


class Fetcher:
    """Fetches into one folder, which is claimed, and keeps its manifest."""

    def __init__(self, hub: HubFolder):
        from huggingface_hub import HfApi

        self.hub, self.api, self.content = hub, HfApi(), hub.content()
        self.listed: dict[tuple[Kind, str, str], RepoFile] = {}
        self.shards: dict[HubPart, list[str]] = {}
        self.damaged = set(_damaged(hub))

    def fetch(self, spec: PrefetchSpec) -> None:
        """Asks for every repository before anything large is fetched, and tells the amount."""
        self._open(spec)
        self._drop_old_parts()
        models = {need: self._model_files(need) for need in spec.models}
        parts = {part: self._files_of(part) for part in spec.parts}
        files = [("models", need.model_id, name) for need, names in models.items() for name in names]
        files += [("data_sets", part.data_set, name) for part, names in parts.items() for name in names]
        for need in spec.streams:
            text = HUB[need.corpus].part
            files += [("data_sets", text.data_set, name) for name in self._names_read(text, need)]
        self._check_room([file for file in dict.fromkeys(files) if not self._has(*file)])
        for need, names in models.items():
            held = {name: self._file("models", need.model_id, name) for name in names}
            self.content["models"][need.model_id]["files"] = held
            self.save()
        for part, names in parts.items():
            self._hold(part, dict(enumerate(names)))
        for need in spec.streams:
            self._stream(need)
        for file in sorted(self.damaged):
            log.warning("%s: not the file that was prefetched (sha256); study %s does not read it", file, spec.study)

    def save(self) -> None:
        """A model that is not whole is not written down; a data set is, for its commit."""
        models = {name: entry for name, entry in self.content["models"].items() if entry["files"]}
        write_json(self.hub.manifest, self.content | {"models": models})

    def _open(self, spec: PrefetchSpec) -> None:
        """Settles the commit of every repository; what cannot be had is told in one message."""
        streamed = [HUB[need.corpus].part for need in spec.streams]
        wanted: dict[tuple[Kind, str], str | None] = {}
        wanted |= {("models", need.model_id): need.revision for need in spec.models}
        wanted |= {("data_sets", part.data_set): REVISIONS.get(part.data_set) for part in (*spec.parts, *streamed)}
        refused = []
        for (kind, name), revision in wanted.items():
            entry = self.content[kind].get(name)
            if entry is not None:
                self.hub.check_revision(kind, name, entry, revision)
                continue
            try:
                self.content[kind][name] = self._entry(kind, name, revision)
            except ValueError as error:
                refused.append(str(error))
        self.save()
        if refused:
            raise ValueError("; ".join(refused))

    def _entry(self, kind: Kind, name: str, revision: str | None) -> dict[str, Any]:
        ask = self.api.model_info if kind == "models" else self.api.dataset_info
        with _asking(name):
            info = ask(name, revision=revision)
            self.api.auth_check(name, repo_type=REPO_TYPES[kind])
        licence = getattr(info.card_data, "license", None) or "none stated"
        entry = {"revision": revision or info.sha, "commit": info.sha, "licence": licence, "files": {}}
        return entry if kind == "models" else entry | {"parts": {}}

    def _drop_old_parts(self) -> None:
        """Nobody goes on with what was begun of a commit that is no longer kept to."""
        for kind, repositories in self.content.items():
            for name, entry in repositories.items():
                for part in self.hub.folder(kind, name).rglob(".*.part"):
                    if not part.name.endswith(_part_suffix(entry["commit"])):
                        part.unlink()

    def _model_files(self, need: ModelNeed) -> list[str]:
        entry = self.content["models"][need.model_id]
        if entry["files"]:
            return list(entry["files"])
        with _asking(need.model_id):
            listed = self.api.list_repo_files(need.model_id, revision=entry["commit"])
        names = [name for name in listed if "/" not in name]
        chosen = [name for name in names if any(fnmatchcase(name, pattern) for pattern in MODEL_FILES)]
        if not any(name.endswith(".safetensors") for name in chosen):
            raise ValueError(f"{need.model_id}: has no weights as safetensors; choose a model that has")
        return sorted(chosen)

    def _files_of(self, part: HubPart) -> list[str]:
        """The data files of a part, in the order in which the library reads them."""
        if part not in self.shards:
            held = self._held(part)
            whole = len(held["files"]) == held["shards"]
            self.shards[part] = (
                [held["files"][str(n)] for n in range(held["shards"])] if whole else self._resolved(part)
            )
        return self.shards[part]

    def _held(self, part: HubPart) -> dict[str, Any]:
        """What the manifest says of a part; that the hub has no file of it is never true."""
        return self.content["data_sets"][part.data_set]["parts"].get(key_of(part), {"shards": -1, "files": {}})

    def _names_read(self, part: HubPart, need: StreamNeed) -> list[str]:
        """The shards that a training reads, as far as their sizes tell."""
        held = self._held(part)
        if _covers(held, need):
            return list(held["files"].values())
        names = self._files_of(part)
        return [names[n] for n in shards_read(need, len(names), lambda number: self._guessed(part, number))]

    def _resolved(self, part: HubPart) -> list[str]:
        import datasets

        commit = self.content["data_sets"][part.data_set]["commit"]
        with _asking(part.data_set):
            builder = datasets.load_dataset_builder(part.data_set, part.configuration, revision=commit)
            by_split = {str(split): files for split, files in builder.config.data_files.items()}
        if part.split not in by_split:
            raise ValueError(f"data set {part}: has no such split, only {', '.join(by_split)}")
        names = [file.partition(f"@{commit}/")[2] for file in by_split[part.split]]
        assert all(names), "the library refuses files outside of the repository"
        return names

    def _guessed(self, part: HubPart, number: int) -> list[int]:
        """Tokens of the documents of a shard, from its size alone."""
        (info,) = self._infos("data_sets", part.data_set, [self._files_of(part)[number]])
        return [TYPICAL_TOKENS] * max(1, round(info.size / BYTES_PER_TOKEN / TYPICAL_TOKENS))

    def _infos(self, kind: Kind, repository: str, names: Sequence[str]) -> list[RepoFile]:
        unknown = [name for name in names if (kind, repository, name) not in self.listed]
        commit = self.content[kind][repository]["commit"]
        for begin in range(0, len(unknown), 100):
            with _asking(repository):
                found = self.api.get_paths_info(
                    repository, unknown[begin : begin + 100], repo_type=REPO_TYPES[kind], revision=commit
                )
            self.listed |= {(kind, repository, info.path): info for info in found}
        return [self.listed[kind, repository, name] for name in names]

    def _check_room(self, files: Sequence[tuple[Kind, str, str]]) -> None:
        """Tells how much there is to fetch; raises ValueError where the disk has no room for it."""
        repositories: dict[tuple[Kind, str], list[str]] = {}
        for kind, repository, name in files:
            repositories.setdefault((kind, repository), []).append(name)
        missing = 0
        for (kind, repository), names in repositories.items():
            commit = self.content[kind][repository]["commit"]
            for info in self._infos(kind, repository, names):
                path = self.hub.file(kind, repository, info.path)
                if path in self.damaged or not _has_size(path, info.size):
                    missing += info.size - _begun(_part(path, commit), info)
        free = shutil.disk_usage(self.hub.assets).free
        log.info(
            "about %.3f GB in %d files are to be fetched; %.3f GB are free in %s",
            missing / GB, len(files), free / GB, self.hub.assets,
        )  # fmt: skip
        if missing > free:
            raise ValueError(
                f"{self.hub.assets}: about {missing / GB:.3f} GB are to be fetched, but {free / GB:.3f} GB are free "
                "there; make room, or set the key assets to a folder on a larger disk"
            )

    def _file(self, kind: Kind, repository: str, name: str) -> dict[str, Any]:
        """Fetches a file, unless it is there; what the manifest says of it."""
        if self._has(kind, repository, name):
            return self.content[kind][repository]["files"][name]
        (info,) = self._infos(kind, repository, [name])
        commit = self.content[kind][repository]["commit"]
        path = self.hub.file(kind, repository, name)
        if path in self.damaged:
            log.warning("%s: not the file that was prefetched (sha256); fetched again", path)
            path.unlink()
            self.damaged.remove(path)
        if not (_has_size(path, info.size) and _is_file(path, info)):
            log.info("%s: %s (%.3f GB)", repository, name, info.size / GB)
            _download(repository, REPO_TYPES[kind], commit, info, path)
        return {"bytes": info.size, "sha256": sha256_of(path)}

    def _has(self, kind: Kind, repository: str, name: str) -> bool:
        """Whether a file is there that the manifest vouches for."""
        known, path = name in self.content[kind][repository]["files"], self.hub.file(kind, repository, name)
        return known and path.is_file() and path not in self.damaged

    def _hold(self, part: HubPart, names: dict[int, str], **more: Any) -> None:
        """Fetches files of a part, given by their places, and writes down that they are there."""
        entry = self.content["data_sets"][part.data_set]
        entry["files"] |= {name: self._file("data_sets", part.data_set, name) for name in names.values()}
        if key_of(part) not in entry["parts"]:
            entry["parts"][key_of(part)] = {"shards": len(self._files_of(part)), "files": {}}
        held = entry["parts"][key_of(part)]
        held["files"] |= {str(number): name for number, name in names.items()}
        held |= more
        self.save()

    def _stream(self, need: StreamNeed) -> None:
        """Fetches the shards that one kind of training reads of a corpus."""
        from residual_mass.backbones.loading import load_tokenizer

        text = HUB[need.corpus]
        if _covers(held := self._held(text.part), need):
            self._hold(text.part, {int(number): name for number, name in held["files"].items()})
            return
        names = self._files_of(text.part)
        tokenizer = load_tokenizer(need.model_id, need.revision, need.source, self.hub.assets)

        def documents(number: int) -> list[int]:
            self._hold(text.part, {number: names[number]})
            return tokens_in(self.hub.folder("data_sets", text.path) / names[number], text.column, tokenizer)

        shards_read(need, len(names), documents)
        others = [
            one for one in self._held(text.part).get("streams", []) if _same_order(one) != _same_order(asdict(need))
        ]
        self._hold(text.part, {}, streams=[*others, asdict(need)])


def shards_read(need: StreamNeed, shards: int, documents: Callable[[int], Sequence[int]]) -> list[int]:
    """Numbers of the shards that a training reads of a corpus, in the order in which it comes to them.

    Args:
        shards: of the corpus.
        documents: given a shard, how many tokens each of its documents has; asked once per shard.
    """
    from residual_mass.backbones.hub_stream import BLOCK, lanes_of

    known = cache(documents)
    used: dict[int, None] = {}

    def entered(lane: Sequence[int]) -> Iterator[int]:
        for number in lane:
            used[number] = None
            yield from known(number)

    for slot in range(need.slots):
        left = need.tokens * MARGIN
        for epoch in itertools.count():
            lanes = lanes_of(need.corpus, shards, need.seed, slot, need.slots, epoch)
            if left <= 0 or used.keys() >= set(itertools.chain(*lanes)):
                break
            readers = [entered(lane) for lane in lanes]
            while left > 0:
                block = [count for reader in readers for count in itertools.islice(reader, BLOCK // len(readers))]
                left -= sum(block) / (1 if shards >= need.slots else need.slots)
                if not block:
                    break
    return list(used)


def tokens_in(file: Path, column: str, tokenizer: Any) -> list[int]:
    """About how many tokens each document of a data file has.

    Raises:
        ValueError: the file has no such column.
    """
    import pyarrow.compute as pc

    from residual_mass.backbones.asset_texts import SEPARATOR
    from residual_mass.backbones.hub_stream import open_file

    sizes: list[int] = []
    characters = tokens = 0
    for table in open_file(file).with_format("arrow").iter(batch_size=BATCH):
        if column not in table.column_names:
            raise ValueError(f"{file}: has no column {column!r}, only {', '.join(table.column_names)}")
        sizes += pc.utf8_length(pc.fill_null(table[column], "")).to_pylist()
        for text in filter(None, table[column].slice(0, SAMPLED).to_pylist()):
            characters += len(text)
            tokens += len(tokenizer(text + SEPARATOR, add_special_tokens=False).input_ids)
    return [math.ceil(size * tokens / max(1, characters)) for size in sizes]


def _download(repository: str, repo_type: str, commit: str, info: RepoFile, path: Path) -> None:
    """Fetches one file; what an interrupted call has fetched of it lies beside it and is gone on with.

    Raises:
        ValueError: it cannot be had, or is not what the hub says it is.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers, disable_progress_bars

    part = _part(path, commit)
    part.parent.mkdir(parents=True, exist_ok=True)
    if not _begun(part, info):
        part.unlink(missing_ok=True)
    url = hf_hub_url(repository, info.path, repo_type=repo_type, revision=commit)
    disable_progress_bars()
    with _asking(repository), open(part, "ab") as stream:
        http_get(url, stream, resume_size=stream.tell(), headers=build_hf_headers(), expected_size=info.size)
    if not _is_file(part, info):
        part.unlink()
        raise ValueError(f"{repository}: {info.path} came damaged (its hash is not the hub's); run prefetch again")
    part.replace(path)


def _part(path: Path, commit: str) -> Path:
    """Where a file grows while it is fetched."""
    return path.with_name(f".{path.name}{_part_suffix(commit)}")


def _part_suffix(commit: str) -> str:
    return f".{commit[:8]}.part"


def _begun(part: Path, info: RepoFile) -> int:
    """Bytes of a file that were fetched by an interrupted call; none, where it holds more than the file has."""
    size = part.stat().st_size if part.is_file() else 0
    return size if size <= info.size else 0


def _has_size(file: Path, size: int) -> bool:
    return file.is_file() and file.stat().st_size == size


def _is_file(path: Path, info: RepoFile) -> bool:
    """Whether a file is the hub's: by its sha256, or by git's hash of a small one."""
    if info.lfs is not None:
        return sha256_of(path) == info.lfs.sha256
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest() == info.blob_id


@contextmanager
def _asking(repository: str) -> Iterator[None]:
    """Around calls of the hub's libraries alone: what goes wrong is told in one line, without the token.

    They raise a dozen unrelated classes, their network clients' among them.
    """
    from huggingface_hub import get_token

    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise
        told = _told(repository, error)
        raise ValueError(told.replace(token, "(the token)") if (token := get_token()) else told) from None


def _told(repository: str, error: Exception) -> str:
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        access = "accept its licence on its page on the hub, then set HF_TOKEN or run `hf auth login`"
        return f"{repository}: asks for access: {access}"
    if isinstance(error, (errors.RevisionNotFoundError, errors.RemoteEntryNotFoundError)):
        return f"{repository}: the hub no longer has the commit, or a file of it ({_first_line(error)}); choose another"
    if isinstance(error, (errors.RepositoryNotFoundError, DatasetNotFoundError)):
        return f"{repository}: not on the hub, or private: check the name, or log in with `hf auth login`"
    return (
        f"{repository}: cannot be fetched ({type(error).__name__}: {_first_line(error)}); check the network and run "
        "prefetch again, what is fetched is kept"
    )


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
