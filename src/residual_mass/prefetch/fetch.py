"""Fetches a study's files from the hub into its assets folder.

Fetches models, and the parts of data sets that benchmarks use, completely. For a training corpus, fetches shards in the
order in which the study's trainings read them, until they hold the required tokens and a margin.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from residual_mass.files import claimed, sha256_of, write_json
from residual_mass.inputs.assets import changed_files
from residual_mass.inputs.hub_data import HUB, REVISIONS, HubPart
from residual_mass.inputs.hub_errors import asking
from residual_mass.inputs.hub_folder import REMEDY, HubFolder, RepoKind, key_of
from residual_mass.prefetch.download import bytes_begun, download, has_size, matches_hub, part_of, part_suffix
from residual_mass.prefetch.missing import covers, problems
from residual_mass.prefetch.needs import same_order
from residual_mass.prefetch.shards import shards_read, tokens_in
from residual_mass.study.specs import ModelNeed, PrefetchSpec, StreamNeed

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile

log = logging.getLogger(__name__)

MODEL_FILES = (
    "model*.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json", "tokenizer*",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template*", "LICENSE*", "NOTICE*",
    "USE_POLICY*",
)  # fmt: skip
"""Patterns of the files fetched from the top folder of a model's repository."""
REPO_TYPES: dict[RepoKind, str] = {"models": "model", "data_sets": "dataset"}
COMPRESSED_BYTES_PER_TOKEN = 3
"""Rough size of compressed text, to estimate sizes before reading it."""
TYPICAL_TOKENS = 1000
"""Rough number of tokens per document, for the same estimate."""
GB = 1e9


def run(spec: PrefetchSpec, assets: Path) -> None:
    """Fetches what the folder lacks; offline, lists it instead.

    Keeps files with the right sha256 and resumes interrupted downloads.

    Raises:
        ValueError: something is missing offline, cannot be fetched or does not fit on the disk; in one line.
    """
    from huggingface_hub.constants import HF_HUB_OFFLINE

    hub = HubFolder(assets)
    if HF_HUB_OFFLINE:
        wrong = [*filter(Path.is_file, changed_files(assets)), *hub.damaged()]
        changed = [f"{file}: not the file that its manifest lists (sha256); {REMEDY}" for file in wrong]
        if lacking := [*problems(spec, assets), *changed]:
            raise ValueError("; ".join(lacking))
        log.info("%s holds everything that study %s reads, with the right sha256", assets, spec.study)
        return
    with claimed(hub.manifest):
        Fetcher(hub).fetch(spec)
    log.info("%s holds everything that study %s reads", assets, spec.study)


class Fetcher:
    """Fetches into one folder, which the caller has claimed, and keeps its manifest up to date."""

    def __init__(self, hub: HubFolder):
        from huggingface_hub import HfApi

        self.hub, self.api, self.content = hub, HfApi(), hub.content()
        self.listed: dict[tuple[RepoKind, str, str], RepoFile] = {}
        self.shards: dict[HubPart, list[str]] = {}
        self.damaged = set(hub.damaged())

    def fetch(self, spec: PrefetchSpec) -> None:
        """Fetches everything, after checking access to all repositories and disk space."""
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
            log.warning("%s: changed since it was prefetched (sha256), but study %s does not read it", file, spec.study)

    def save(self) -> None:
        """Writes the manifest without incomplete models, but with all data sets, to keep their commits."""
        models = {name: entry for name, entry in self.content["models"].items() if entry["files"]}
        write_json(self.hub.manifest, self.content | {"models": models})

    def _open(self, spec: PrefetchSpec) -> None:
        """Resolves the commit of every repository; raises ValueError listing all inaccessible ones."""
        streamed = [HUB[need.corpus].part for need in spec.streams]
        wanted: dict[tuple[RepoKind, str], str | None] = {}
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

    def _entry(self, kind: RepoKind, name: str, revision: str | None) -> dict[str, Any]:
        ask = self.api.model_info if kind == "models" else self.api.dataset_info
        with asking(name):
            info = ask(name, revision=revision)
            self.api.auth_check(name, repo_type=REPO_TYPES[kind])
        licence = getattr(info.card_data, "license", None) or "none stated"
        entry = {"revision": revision or info.sha, "commit": info.sha, "licence": licence, "files": {}}
        return entry if kind == "models" else entry | {"parts": {}}

    def _drop_old_parts(self) -> None:
        """Removes partial downloads of other commits, which would never be resumed."""
        for kind, repositories in self.content.items():
            for name, entry in repositories.items():
                for part in self.hub.folder(kind, name).rglob(".*.part"):
                    if not part.name.endswith(part_suffix(entry["commit"])):
                        part.unlink()

    def _model_files(self, need: ModelNeed) -> list[str]:
        entry = self.content["models"][need.model_id]
        if entry["files"]:
            return list(entry["files"])
        with asking(need.model_id):
            listed = self.api.list_repo_files(need.model_id, revision=entry["commit"])
        names = [name for name in listed if "/" not in name]
        chosen = [name for name in names if any(fnmatchcase(name, pattern) for pattern in MODEL_FILES)]
        if not any(name.endswith(".safetensors") for name in chosen):
            raise ValueError(f"{need.model_id}: has no safetensors weights; choose another model")
        return sorted(chosen)

    def _files_of(self, part: HubPart) -> list[str]:
        """Returns the data files of a part, in the library's order."""
        if part not in self.shards:
            held = self._held(part)
            whole = len(held["files"]) == held["shards"]
            self.shards[part] = (
                [held["files"][str(n)] for n in range(held["shards"])] if whole else self._resolved(part)
            )
        return self.shards[part]

    def _held(self, part: HubPart) -> dict[str, Any]:
        """Returns the manifest's entry of a part; -1 shards if there is none."""
        return self.content["data_sets"][part.data_set]["parts"].get(key_of(part), {"shards": -1, "files": {}})

    def _names_read(self, part: HubPart, need: StreamNeed) -> list[str]:
        """Returns the shards that a training reads, estimated from their sizes."""
        held = self._held(part)
        if covers(held, need):
            return list(held["files"].values())
        names = self._files_of(part)
        return [names[n] for n in shards_read(need, len(names), lambda number: self._guessed(part, number))]

    def _resolved(self, part: HubPart) -> list[str]:
        import datasets

        commit = self.content["data_sets"][part.data_set]["commit"]
        with asking(part.data_set):
            builder = datasets.load_dataset_builder(part.data_set, part.configuration, revision=commit)
            by_split = {str(split): files for split, files in builder.config.data_files.items()}
        if part.split not in by_split:
            raise ValueError(
                f"data set {part}: has no such split, only {', '.join(by_split)}; name one of these in hub_data"
            )
        names = [file.partition(f"@{commit}/")[2] for file in by_split[part.split]]
        assert all(names), "the library refuses files outside of the repository"
        return names

    def _guessed(self, part: HubPart, number: int) -> list[int]:
        """Estimates the tokens of a shard's documents from its size."""
        (info,) = self._infos("data_sets", part.data_set, [self._files_of(part)[number]])
        return [TYPICAL_TOKENS] * max(1, round(info.size / COMPRESSED_BYTES_PER_TOKEN / TYPICAL_TOKENS))

    def _infos(self, kind: RepoKind, repository: str, names: Sequence[str]) -> list[RepoFile]:
        unknown = [name for name in names if (kind, repository, name) not in self.listed]
        commit = self.content[kind][repository]["commit"]
        for begin in range(0, len(unknown), 100):
            with asking(repository):
                found = self.api.get_paths_info(
                    repository, unknown[begin : begin + 100], repo_type=REPO_TYPES[kind], revision=commit
                )
            self.listed |= {(kind, repository, info.path): info for info in found}
        return [self.listed[kind, repository, name] for name in names]

    def _check_room(self, files: Sequence[tuple[RepoKind, str, str]]) -> None:
        """Logs how much will be fetched; raises ValueError if it does not fit on the disk."""
        repositories: dict[tuple[RepoKind, str], list[str]] = {}
        for kind, repository, name in files:
            repositories.setdefault((kind, repository), []).append(name)
        missing = 0
        for (kind, repository), names in repositories.items():
            commit = self.content[kind][repository]["commit"]
            for info in self._infos(kind, repository, names):
                path = self.hub.file(kind, repository, info.path)
                if path in self.damaged or not has_size(path, info.size):
                    missing += info.size - bytes_begun(part_of(path, commit), info)
        free = shutil.disk_usage(self.hub.assets).free
        log.info(
            "about %.3f GB in %d files to be fetched; %.3f GB free in %s",
            missing / GB, len(files), free / GB, self.hub.assets,
        )  # fmt: skip
        if missing > free:
            raise ValueError(
                f"{self.hub.assets}: about {missing / GB:.3f} GB to be fetched, but only {free / GB:.3f} GB free; make "
                "room, or set the key assets to a folder on a larger disk"
            )

    def _file(self, kind: RepoKind, repository: str, name: str) -> dict[str, Any]:
        """Fetches a file unless present; returns its entry in the manifest."""
        if self._has(kind, repository, name):
            return self.content[kind][repository]["files"][name]
        (info,) = self._infos(kind, repository, [name])
        commit = self.content[kind][repository]["commit"]
        path = self.hub.file(kind, repository, name)
        if path in self.damaged:
            log.warning("%s: changed since it was prefetched (sha256); fetching it again", path)
            path.unlink()
            self.damaged.remove(path)
        if not (has_size(path, info.size) and matches_hub(path, info)):
            log.info("%s: %s (%.3f GB)", repository, name, info.size / GB)
            download(repository, REPO_TYPES[kind], commit, info, path)
        return {"bytes": info.size, "sha256": sha256_of(path)}

    def _has(self, kind: RepoKind, repository: str, name: str) -> bool:
        """Whether the manifest lists a file and it is unchanged."""
        known, path = name in self.content[kind][repository]["files"], self.hub.file(kind, repository, name)
        return known and path.is_file() and path not in self.damaged

    def _hold(self, part: HubPart, names: dict[int, str], **more: Any) -> None:
        """Fetches files of a part, given by shard number, and lists them in the manifest."""
        entry = self.content["data_sets"][part.data_set]
        entry["files"] |= {name: self._file("data_sets", part.data_set, name) for name in names.values()}
        if key_of(part) not in entry["parts"]:
            entry["parts"][key_of(part)] = {"shards": len(self._files_of(part)), "files": {}}
        held = entry["parts"][key_of(part)]
        held["files"] |= {str(number): name for number, name in names.items()}
        held |= more
        self.save()

    def _stream(self, need: StreamNeed) -> None:
        """Fetches the shards that a training reads of a corpus."""
        from residual_mass.backbones.loading import load_tokenizer

        text = HUB[need.corpus]
        if covers(held := self._held(text.part), need):
            self._hold(text.part, {int(number): name for number, name in held["files"].items()})
            return
        names = self._files_of(text.part)
        tokenizer = load_tokenizer(need.model_id, need.revision, need.source, self.hub.assets)

        def document_tokens(number: int) -> list[int]:
            self._hold(text.part, {number: names[number]})
            return tokens_in(self.hub.folder("data_sets", text.path) / names[number], text.column, tokenizer)

        shards_read(need, len(names), document_tokens)
        others = [
            one for one in self._held(text.part).get("streams", []) if same_order(one) != same_order(asdict(need))
        ]
        self._hold(text.part, {}, streams=[*others, asdict(need)])
