"""Prefetching from a small hub on this machine: what arrives is what is read online, and what goes wrong is told."""

from __future__ import annotations

import io
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import lm_eval.tasks
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers.utils.hub
from tests.conftest import byte_tokenizer, tiny_llama
from tests.small_hub import Repository, SmallHub, serving

from residual_mass.backbones import hub_stream
from residual_mass.backbones.corpora import held_out_corpus, training_corpus
from residual_mass.backbones.hub_stream import HubStream
from residual_mass.backbones.loading import load_backbone
from residual_mass.benchmarks import babilong, longbench, ruler
from residual_mass.benchmarks.catalogue import BENCHMARKS, parts_of
from residual_mass.benchmarks.examples import harness_config
from residual_mass.files import read_json, sha256_of, write_json
from residual_mass.inputs.hub_commits import commits_of, newest
from residual_mass.inputs.hub_data import ESSAYS, HUB, REVISIONS, HubPart
from residual_mass.inputs.hub_errors import asking
from residual_mass.inputs.hub_folder import HubFolder, NotPrefetchedError
from residual_mass.prefetch import fetch
from residual_mass.prefetch.missing import covers, problems
from residual_mass.prefetch.needs import hub_needs, same_order
from residual_mass.prefetch.shards import shards_read
from residual_mass.study.specs import BackboneSpec, ModelNeed, PrefetchSpec, StreamNeed

TOKEN = "hf_never_to_be_seen"
COMMIT = "c0ffee" + "0" * 34
MODEL = "org/Small-Llama"
SPEC = BackboneSpec("paper", MODEL, COMMIT, "hub", "float32", "bytes", 2048, False, name="small")
STREAM = StreamNeed("fineweb", "bytes", MODEL, COMMIT, "hub", seed=0, slots=1, tokens=0)
SHARDS, DOCUMENTS = 12, 20


def parquet(rows: list[dict[str, Any]]) -> bytes:
    stream = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), stream, row_group_size=7)
    return stream.getvalue()


def card(**configurations: dict[str, str]) -> bytes:
    """A data set's README, which says what the files of each configuration are."""
    listed = [
        {"config_name": name, "data_files": [{"split": split, "path": path} for split, path in files.items()]}
        for name, files in configurations.items()
    ]
    return f"---\nconfigs: {json.dumps(listed)}\n---\n".encode()


def document(shard: int, number: int) -> str:
    return f"<{shard}.{number}:" + "x" * ((shard * 31 + number * 13) % 60) + ">"


@pytest.fixture(scope="session")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Repository]:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(layers=1).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    model = {file.name: file.read_bytes() for file in folder.iterdir()}
    model |= {"original/consolidated.00.pth": b"not wanted", "pytorch_model.bin": b"nor this", "LICENSE.txt": b"yes"}
    text = {
        f"data/dump-{shard % 3}/{shard:03}.parquet": parquet(
            [{"text": document(shard, number), "id": number} for number in range(DOCUMENTS)]
        )
        for shard in range(SHARDS)
    }
    lines = {"lines/test-0.parquet": parquet([{"text": f"Line {number}.\n"} for number in range(80)])}
    stories = {
        f"data/{task}/4k.parquet": parquet([{"input": f"{task} {n}", "question": "?", "target": "x"} for n in range(4)])
        for task in ("qa1", "qa2", "qa6")
    }
    report = {"gov_report/test.jsonl": b'{"context": "a", "answers": ["b"]}\n' * 3}
    return {
        f"models/{MODEL}": Repository(COMMIT, model, "llama9"),
        "datasets/HuggingFaceFW/fineweb": Repository(
            COMMIT, {"README.md": card(default={"train": "data/*/*"}), **text}, "odc-by"
        ),
        "datasets/Salesforce/wikitext": Repository(
            REVISIONS["Salesforce/wikitext"],
            {"README.md": card(**{"wikitext-103-raw-v1": {"test": "lines/test-*"}}), **lines},
        ),
        "datasets/RMT-team/babilong-1k-samples": Repository(
            COMMIT, {"README.md": card(**{"4k": {t: f"data/{t}/4k*" for t in ("qa1", "qa2", "qa6")}}), **stories}
        ),
        "datasets/Xnhyacinth/LongBench": Repository(
            COMMIT, {"README.md": card(gov_report={"test": "gov_report/test*"}), **report}
        ),
        "datasets/baber/paul_graham_essays": Repository(
            COMMIT, {"essays.parquet": parquet([{"text": "One  essay."}, {"text": "Another."}])}
        ),
    }


@pytest.fixture
def hub(repositories: dict[str, Repository], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallHub]:
    """The libraries' hub for one test; blocks are small, so that shards are read in turn."""
    with serving(SmallHub({name: replace(each) for name, each in repositories.items()})) as small:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", small.address)
        monkeypatch.setattr(
            transformers.utils.hub, "_hf_api", None, raising=False
        )  # kept, with the hub of another test
        monkeypatch.setattr(
            huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE",
            small.address + "/{repo_id}/resolve/{revision}/{filename}",
        )  # fmt: skip
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub cache"))
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", small.address)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets cache")
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        newest.cache_clear()
        monkeypatch.setattr(hub_stream, "BLOCK", 8)
        monkeypatch.setattr(hub_stream, "LANES", 2)
        yield small


@pytest.fixture
def shut(monkeypatch: pytest.MonkeyPatch) -> Callable[[SmallHub], None]:
    """Shuts the network: the libraries' own switch, and a hub that would only fail."""

    def close(hub: SmallHub) -> None:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        hub.status = 500
        hub.fetched.clear()
        hub.tokens.clear()

    return close


def needs(*streams: StreamNeed) -> PrefetchSpec:
    parts = (HUB["wikitext"].part, HubPart("RMT-team/babilong-1k-samples", "4k", "qa1"), ESSAYS)
    parts += (HubPart("Xnhyacinth/LongBench", "gov_report", "test"),)
    return PrefetchSpec("paper", (ModelNeed(MODEL, COMMIT),), parts, streams)


ONLY_MODEL = PrefetchSpec("paper", (ModelNeed(MODEL, COMMIT),), (), ())


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as caught:
        call()
    assert "\n" not in str(caught.value) and TOKEN not in str(caught.value)
    return str(caught.value)


def with_assets(folder: Path) -> Path:
    """An assets folder whose wheels are unpacked."""
    write_json(folder / "manifest.json", {"pins": {}, "files": []})
    return folder


def test_offline_equals_online(
    hub: SmallHub, shut: Callable[[SmallHub], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assets, empty = with_assets(tmp_path / "a[1]b"), tmp_path / "empty"  # a name that is a pattern to some
    tokenizer, sequences = byte_tokenizer(), 40

    def read(folder: Path) -> dict[str, Any]:
        corpus = training_corpus(["fineweb"], tokenizer, 64, 0, folder)
        held_out = held_out_corpus("wikitext", tokenizer, 50, 0, folder)
        backbone = load_backbone(SPEC, folder, torch.device("cpu"))
        return {
            "train": [corpus.sequence(i) for i in range(sequences)],
            "position": corpus.position(),
            "held out": [held_out.sequence(i) for i in range(3)],
            "weights": {name: tensor.sum().item() for name, tensor in backbone.model.state_dict().items()},
            "tokens": backbone.encode("Some text."),
            "identity": backbone.identity,
            "stories": babilong.build_examples("babilong_qa1", None, 4096, 3, 0, HubFolder(folder)),
            "reports": longbench.build_examples("longbench_gov_report", None, 4096, 9, 0, HubFolder(folder)),
        }

    online = read(empty)
    assert online["stories"] == [{"input": f"qa1 {n}", "question": "?", "target": "x"} for n in range(3)]
    with caplog.at_level(logging.INFO):
        fetch.run(needs(replace(STREAM, tokens=64 * sequences)), assets)
    shut(hub)
    assert read(assets) == online
    assert hub.fetched == [] and hub.tokens == set()  # nobody so much as asked
    fetch.run(needs(replace(STREAM, tokens=64 * sequences)), assets)  # now a check
    content = read_json(assets / "hub.json")
    entry = content["data_sets"]["HuggingFaceFW/fineweb"]
    assert (entry["commit"], entry["licence"]) == (COMMIT, "odc-by")
    assert entry["parts"]["/train"]["shards"] == SHARDS and 2 <= len(entry["files"]) < SHARDS
    model = content["models"][MODEL]
    assert {"model.safetensors", "config.json", "tokenizer.json", "LICENSE.txt"} <= set(model["files"])
    assert not {"pytorch_model.bin", "original/consolidated.00.pth"} & set(model["files"])
    assert list(content["data_sets"]["RMT-team/babilong-1k-samples"]["files"]) == ["data/qa1/4k.parquet"]
    assert "files to be fetched; " in caplog.text
    assert TOKEN not in caplog.text + "".join(f.read_text("latin-1") for f in assets.rglob("*") if f.is_file())


@pytest.mark.parametrize("content", [[], {}, {"models": {}}, {"models": {}, "data_sets": {}, "files": []}])
def test_another_file_in_place_of_the_manifest_is_refused_in_one_line(content: Any, tmp_path: Path) -> None:
    write_json(tmp_path / "hub.json", content)
    for call in (lambda: HubFolder(tmp_path).content(), lambda: problems(ONLY_MODEL, with_assets(tmp_path))):
        assert error_of(call).startswith(f"{tmp_path / 'hub.json'}: not a manifest of prefetched files; delete it and")


def test_a_damaged_list_of_the_assets_is_told_in_one_line(tmp_path: Path) -> None:
    for content in ({}, [], {"files": [{}]}, {"files": 3}):
        write_json(tmp_path / "manifest.json", content)
        assert "manifest.json: not a manifest of assets; delete it" in error_of(lambda: problems(ONLY_MODEL, tmp_path))


def test_the_commit_that_is_read_is_told(hub: SmallHub, shut: Callable[[SmallHub], None], tmp_path: Path) -> None:
    read = ("HuggingFaceFW/fineweb", "Salesforce/wikitext")
    fineweb = hub.repositories["datasets/HuggingFaceFW/fineweb"]
    fineweb.commit, fineweb.earlier = "b" * 40, (COMMIT,)
    online = HubFolder(tmp_path / "empty")
    assert commits_of(read, online) == {read[0]: "b" * 40, read[1]: REVISIONS[read[1]]}
    fineweb.commit = "c" * 40  # once asked, a process keeps to it
    assert commits_of(read, online)[read[0]] == "b" * 40
    newest.cache_clear()
    fetch.run(PrefetchSpec("paper", (), (), (replace(STREAM, tokens=64),)), with_assets(tmp_path))
    fineweb.commit = "d" * 40
    shut(hub)
    assert commits_of(read, HubFolder(tmp_path))[read[0]] == "c" * 40
    assert commits_of(read, online)[read[0]] is None


def test_a_run_begun_online_goes_on_offline(hub: SmallHub, shut: Callable[[SmallHub], None], tmp_path: Path) -> None:
    assets = with_assets(tmp_path / "assets")
    fetch.run(PrefetchSpec("paper", (ModelNeed(MODEL, COMMIT),), (), (replace(STREAM, tokens=64 * 30),)), assets)
    stream = HubStream("fineweb", byte_tokenizer(), 64, 0)
    stream.sequence(11)
    position = json.loads(json.dumps(stream.position()))
    wanted = [stream.sequence(index) for index in range(12, 30)]
    shutil.copytree(assets, tmp_path / "other")
    content = read_json(assets / "hub.json")
    content["data_sets"]["HuggingFaceFW/fineweb"]["parts"]["/train"]["shards"] += 1
    write_json(tmp_path / "other/hub.json", content)
    stream = HubStream("fineweb", byte_tokenizer(), 64, 0, hub=HubFolder(tmp_path / "other"))
    line = error_of(lambda: stream.sequence(79))
    assert f"the hub has {SHARDS} shards of HuggingFaceFW/fineweb, but the prefetched folder lists {SHARDS + 1}" in line
    shut(hub)
    resumed = HubStream("fineweb", byte_tokenizer(), 64, 0, hub=HubFolder(assets))
    resumed.seek(position)
    assert [resumed.sequence(index) for index in range(12, 30)] == wanted


@pytest.mark.slow
def test_what_was_not_planned_comes_from_the_hub_or_is_told(
    hub: SmallHub, shut: Callable[[SmallHub], None], tmp_path: Path
) -> None:
    assets = with_assets(tmp_path / "assets")
    fetch.run(PrefetchSpec("paper", (ModelNeed(MODEL, COMMIT),), (), (replace(STREAM, tokens=64 * 4),)), assets)
    online = HubStream("fineweb", byte_tokenizer(), 64, 0)
    wanted = [online.sequence(index) for index in range(80)]
    both = HubStream("fineweb", byte_tokenizer(), 64, 0, hub=HubFolder(assets))
    assert [both.sequence(index) for index in range(80)] == wanted
    shut(hub)
    alone = HubStream("fineweb", byte_tokenizer(), 64, 0, hub=HubFolder(assets))
    assert [alone.sequence(index) for index in range(4)] == wanted[:4]
    line = error_of(lambda: alone.sequence(79))
    assert re.match(r"corpus 'fineweb': the run continues in shard \d+ of .* more phi\.steps", line)


@pytest.mark.parametrize(("slots", "shards"), [(1, 12), (3, 12), pytest.param(20, 12, marks=pytest.mark.slow)])
def test_shards_are_those_that_the_streams_read(slots: int, shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against streams that tell what they open; counts of tokens are exact here, so only the margin is added."""
    monkeypatch.setattr(hub_stream, "BLOCK", 8)
    monkeypatch.setattr(hub_stream, "LANES", 2)
    monkeypatch.setattr("residual_mass.prefetch.shards.MARGIN", 1.0)
    tokenizer, opened = byte_tokenizer(), set()

    class Telling(HubStream):
        _shards = shards

        def _open_shard(self, number: int) -> Any:
            opened.add(number)
            rows = [{"text": document(number, n)} for n in range(self.slot % 4, DOCUMENTS, 4 if slots > shards else 1)]
            return datasets.Dataset.from_list(rows).to_iterable_dataset()

    for slot in range(slots):
        stream = Telling("fineweb", tokenizer, 50, 3, slot, slots)
        for index in range(12):
            stream.sequence(index)
    sizes = [[len(document(shard, n)) + 2 for n in range(DOCUMENTS)] for shard in range(shards)]
    need = replace(STREAM, seed=3, slots=slots, tokens=50 * 12)
    planned = shards_read(need, shards, lambda number: sizes[number])
    assert opened <= set(planned)
    assert slots > 1 or (opened == set(planned) and len(planned) < shards)


def test_an_interrupted_file_goes_on_where_it_stopped(
    hub: SmallHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.file_download.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 500)
    hub.cut_at, hub.cuts = 1000, 50
    line = error_of(lambda: fetch.run(ONLY_MODEL, tmp_path))
    assert line.startswith(f"{MODEL}: cannot be fetched (") and line.endswith("prefetch again, which resumes")
    assert read_json(tmp_path / "hub.json")["models"] == {}  # half a model is none
    (part,) = tmp_path.rglob(".*.part")
    assert part.stat().st_size == 1000
    hub.cuts = 0
    hub.fetched.clear()
    files, folder = hub.repositories[f"models/{MODEL}"].files, tmp_path / "hub/models" / MODEL
    (folder / ".config.json.deadbeef.part").write_bytes(b"of another commit")
    (folder / f".tokenizer.json.{COMMIT[:8]}.part").write_bytes(files["tokenizer.json"] + b"and more")
    wanted = {name for name in files if "/" not in name and name != "pytorch_model.bin"}
    rest = sum(len(files[name]) for name in wanted if not (folder / name).is_file()) - 1000
    usage = shutil._ntuple_diskusage(10**6, 10**6, rest)
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda path: usage)
    fetch.run(ONLY_MODEL, tmp_path)
    assert (f"{MODEL}/model.safetensors", 1000) in hub.fetched
    assert f"{MODEL}/config.json" not in dict(hub.fetched)  # it was there
    assert not list(tmp_path.rglob(".*.part"))
    hub.fetched.clear()
    fetch.run(ONLY_MODEL, tmp_path)
    assert hub.fetched == [] and load_backbone(SPEC, tmp_path, torch.device("cpu")).model is not None


def test_a_changed_file_is_told_and_fetched_again(
    hub: SmallHub, shut: Callable[[SmallHub], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fetch.run(ONLY_MODEL, with_assets(tmp_path))
    weights = tmp_path / "hub/models" / MODEL / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    line = error_of(lambda: load_backbone(SPEC, tmp_path, torch.device("cpu")))
    assert line.startswith(f"{weights}: not the file that {tmp_path / 'hub.json'} lists (sha256); run the target")
    fetch.run(ONLY_MODEL, tmp_path)
    assert weights.read_bytes() == whole and f"{weights}: changed since it was prefetched" in caplog.text
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    shut(hub)
    assert f"{weights}: not the file that its manifest lists (sha256); run the" in error_of(
        lambda: fetch.run(ONLY_MODEL, tmp_path)
    )
    weights.write_bytes(whole[:-1])
    assert f"has {len(whole) - 1} bytes, not {len(whole)}" in problems(ONLY_MODEL, tmp_path)[0]
    weights.unlink()
    assert f"{weights}: no such file" in problems(ONLY_MODEL, tmp_path)[0]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_that_was_there_before_is_taken_only_if_it_is_the_hubs(name: str, hub: SmallHub, tmp_path: Path) -> None:
    """Of a large file the hub has the sha256, of a small one git's hash."""
    files, folder = hub.repositories[f"models/{MODEL}"].files, tmp_path / "hub/models" / MODEL
    folder.mkdir(parents=True)
    (folder / name).write_bytes(files[name][:-1] + b"!")
    (folder / "tokenizer.json").write_bytes(files["tokenizer.json"])
    fetch.run(ONLY_MODEL, tmp_path)
    assert (folder / name).read_bytes() == files[name]
    fetched = {path for path, _ in hub.fetched}
    assert f"{MODEL}/{name}" in fetched and f"{MODEL}/tokenizer.json" not in fetched


def test_a_file_that_comes_damaged_is_not_taken(hub: SmallHub, tmp_path: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        hub.damaged = {name}
        assert f"{MODEL}: {name} arrived damaged" in error_of(lambda: fetch.run(ONLY_MODEL, tmp_path))
        assert not (tmp_path / "hub/models" / MODEL / name).exists()
        shutil.rmtree(tmp_path / "hub")


@pytest.mark.parametrize("token", ["", TOKEN])
def test_everything_that_asks_for_access_is_told_at_once(
    token: str, hub: SmallHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    for name in (f"models/{MODEL}", "datasets/RMT-team/babilong-1k-samples"):
        hub.repositories[name].gated = True
    del hub.repositories["datasets/Xnhyacinth/LongBench"]
    hub.repositories["datasets/Salesforce/wikitext"].commit = "0" * 40
    line = error_of(lambda: fetch.run(needs(), tmp_path))
    assert f"{MODEL}: access is restricted: accept its licence" in line and "HF_TOKEN" in line
    assert "RMT-team/babilong-1k-samples: access is restricted" in line
    assert "Xnhyacinth/LongBench: not on the hub, or private" in line
    assert "Salesforce/wikitext: the hub no longer has the commit" in line
    assert hub.fetched == []


def test_a_server_error_is_told_without_the_token(hub: SmallHub, tmp_path: Path) -> None:
    hub.status = 503
    line = error_of(lambda: fetch.run(ONLY_MODEL, tmp_path))
    assert line.startswith(f"{MODEL}: cannot be fetched (HfHubHTTPError: ") and "503" in line
    assert TOKEN in hub.tokens  # it was sent, so it might have come back


def test_a_message_that_holds_the_token_is_told_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)

    def ask() -> None:
        with asking(MODEL):
            raise ConnectionError(f"the proxy refused Bearer {TOKEN}")

    assert "the proxy refused Bearer (the token)" in error_of(ask)


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "data/../../x"])
def test_names_that_lead_out_of_the_folder_are_refused(name: str, tmp_path: Path) -> None:
    """From the hub, and from a manifest."""
    hub = HubFolder(tmp_path)
    entry = {"commit": COMMIT, "revision": COMMIT, "files": {name: {"bytes": 1, "sha256": "0"}}}
    write_json(hub.manifest, {"models": {MODEL: entry}, "data_sets": {}})
    for call in (
        lambda: hub.model(MODEL, COMMIT),
        lambda: problems(ONLY_MODEL, tmp_path),
        lambda: fetch.run(ONLY_MODEL, tmp_path),
    ):
        assert error_of(call).startswith(f"{MODEL}: a file is named {name!r}, which leads out of its folder")


def test_files_elsewhere_are_not_prefetched(hub: SmallHub, tmp_path: Path) -> None:
    name = "RMT-team/babilong-1k-samples"
    elsewhere = f"{hub.address}/datasets/Salesforce/wikitext/resolve/main/lines/test-0.parquet"
    hub.repositories[f"datasets/{name}"].files = {"README.md": card(**{"4k": {"qa1": elsewhere}})}
    line = error_of(lambda: fetch.run(PrefetchSpec("paper", (), (HubPart(name, "4k", "qa1"),), ()), tmp_path))
    assert line.startswith(f"{name}: cannot be fetched (ValueError: Data files don't belong to {name}")


def test_weights_in_an_inner_folder_are_none(hub: SmallHub, tmp_path: Path) -> None:
    hub.repositories[f"models/{MODEL}"].files = {"config.json": b"{}", "model/weights.safetensors": b"inner"}
    assert "has no safetensors weights" in error_of(lambda: fetch.run(ONLY_MODEL, tmp_path))


def test_room_is_looked_at_first(hub: SmallHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 10))
    line = error_of(lambda: fetch.run(needs(replace(STREAM, tokens=5000)), tmp_path))
    assert re.search(r"about 0\.\d+ GB to be fetched, but only 0\.000 GB free; make room", line)
    assert not [path for path, _ in hub.fetched if not path.endswith("README.md")]


def test_another_revision_is_refused_later(hub: SmallHub, tmp_path: Path) -> None:
    fetch.run(needs(), tmp_path)
    moved = "deadbeef" + "0" * 32
    for repository in hub.repositories.values():  # the hub moves on
        repository.commit, repository.earlier = moved, (repository.commit,)
    more = replace(needs(), parts=(HubPart("RMT-team/babilong-1k-samples", "4k", "qa2"),))
    fetch.run(more, tmp_path)
    stories = read_json(tmp_path / "hub.json")["data_sets"]["RMT-team/babilong-1k-samples"]
    assert stories["commit"] == COMMIT and len(stories["files"]) == 2  # what was found first is kept to
    with pytest.raises(NotPrefetchedError, match=f"holds {MODEL} at {COMMIT}, but {moved} is requested"):
        HubFolder(tmp_path).model(MODEL, moved)
    newer = replace(needs(), models=(ModelNeed(MODEL, moved),))
    assert f"holds {MODEL} at {COMMIT}, but {moved} is requested" in error_of(lambda: fetch.run(newer, tmp_path))
    assert f"model {MODEL} at {moved}" in problems(newer, with_assets(tmp_path))[0]
    for repository in hub.repositories.values():
        repository.earlier = ()
    hub.status = 500
    fetch.run(more, tmp_path)  # nothing to fetch, so nothing to ask
    hub.status = 200
    most = replace(needs(), parts=(HubPart("RMT-team/babilong-1k-samples", "4k", "qa6"),))
    assert "RMT-team/babilong-1k-samples: " in error_of(lambda: fetch.run(most, tmp_path))


def test_all_that_is_missing_is_told_in_one_line(tmp_path: Path) -> None:
    need = replace(STREAM, tokens=1234567)
    (line,) = problems(needs(need), tmp_path)
    for missing in (
        f"{tmp_path / 'manifest.json'}: no such file; model {MODEL} at {COMMIT}; data set Salesforce/wikitext (",
        "data set baber/paul_graham_essays (default, train); ",
        "corpus fineweb: 1,234,567 tokens of it for seed 0 and 1 sequences per step, as the tokenizer bytes counts",
    ):
        assert missing in line
    assert "\n" not in line and line.endswith("on a machine with network, then copy the folder here")
    assert problems(PrefetchSpec("mini", (), (), ()), with_assets(tmp_path)) == []
    write_json(tmp_path / "manifest.json", {"pins": {}, "files": [{"path": "qa/squad.json", "sha256": "0"}]})
    assert f"{tmp_path}/qa/squad.json: no such file" in problems(PrefetchSpec("mini", (), (), ()), tmp_path)[0]


def test_texts_that_are_continued_are_read_whole() -> None:
    force = {"backbone": {"source": "assets"}, "corpora": ["wikitext", "books"], "documents": 2, "seed": 0}
    found = hub_needs("study", [force])
    assert (found.models, found.parts, found.streams) == ((), (HUB["wikitext"].part,), ())


def test_needs_are_read_from_the_specs_of_jobs() -> None:
    backbone = {"model_id": MODEL, "revision": COMMIT, "source": "hub", "tokenizer": "bytes"}
    train = {
        "backbone": backbone, "length": "1k", "corpora": ["sotu", "fineweb"], "held_out": ["wikitext", "books"],
        "steps": 11, "seed": 0, "sequences_per_step": 2, "replay": {"pool": 1, "reuse": 1},
    }  # fmt: skip
    replayed = train | {"length": "2k", "steps": 11, "replay": {"pool": 4, "reuse": 5}}
    prompts = {"benchmark": "babilong", "length": "4k", "tokenizer_source": "assets", "data_source": "hub"}
    scored = {"benchmark": "ruler", "data_source": "hub", "backbone": backbone, "length": "4k"}
    found = {"corpus": "wikitext", "length": "4k"}  # read out of captured files
    got = hub_needs("paper", [train, replayed, prompts, scored, found])
    assert got.models == (ModelNeed(MODEL, COMMIT),)
    stories = (HubPart("RMT-team/babilong-1k-samples", "4k", f"qa{number}") for number in range(1, 6))
    assert got.parts == (HUB["wikitext"].part, *stories)
    assert got.streams == (replace(STREAM, slots=2, tokens=5 * 1024),)  # of 11 sequences 5; of 3 replayed ones 1
    assert hub_needs("mini", [found, {"backbone": backbone | {"source": "assets"}}]).models == ()


@pytest.mark.parametrize(("name", "value"), [("corpus", "arxiv"), ("tokenizer", "words"), ("seed", 1), ("slots", 2)])
def test_trainings_that_read_other_documents_need_streams_of_their_own(name: str, value: Any) -> None:
    """And the fetched shards of one do not cover the other."""
    need = replace(STREAM, tokens=1024)
    other = replace(need, **{name: value})
    assert same_order(asdict(need)) != same_order(asdict(other))
    assert covers({"streams": [asdict(need)]}, need) and not covers({"streams": [asdict(need)]}, other)
    longer = replace(need, tokens=2048)
    assert same_order(asdict(longer)) == same_order(asdict(need)) and not covers({"streams": [asdict(need)]}, longer)


def test_parts_are_those_that_the_harness_reads() -> None:
    for task in BENCHMARKS["longbench"]:
        config = harness_config("longbench", task.name)
        part = HubPart(config["dataset_path"], config["dataset_name"], config["test_split"])
        assert part in parts_of("longbench", 65536)
    config = harness_config("babilong", "babilong_qa3")
    assert HubPart(config["dataset_path"], "64k", config["test_split"]) in parts_of("babilong", 65536)
    assert parts_of("ruler", 4096) == [ESSAYS]
    haystack = Path(lm_eval.tasks.__file__).with_name("ruler") / "prepare_niah.py"
    assert f'load_dataset("{ESSAYS.data_set}", split="{ESSAYS.split}")' in haystack.read_text()


@pytest.mark.slow
def test_ruler_of_the_hub_reads_the_prefetched_essays(
    hub: SmallHub, shut: Callable[[SmallHub], None], tmp_path: Path
) -> None:
    (tmp_path / "nltk_data/tokenizers/punkt_tab/english").mkdir(parents=True)
    fetch.run(PrefetchSpec("paper", (), (ESSAYS,), ()), with_assets(tmp_path))
    shut(hub)
    line = error_of(lambda: ruler.harness_data(HubFolder(tmp_path)))
    assert line.endswith("hotpotqa.json: not the file that the harness downloads (sha256); run the assets stage")
    (tmp_path / "qa").mkdir()
    for name in ruler.QUESTIONS:
        (tmp_path / "qa" / name).write_text(name)
    ruler_questions = {name: sha256_of(tmp_path / "qa" / name) for name in ruler.QUESTIONS}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ruler, "QUESTIONS", ruler_questions)
        data = ruler.harness_data(HubFolder(tmp_path))
        replaced = data({"get_haystack": str.upper})
    assert replaced["get_haystack"]("essay") == ["One", "essay.", "Another."]
    assert replaced["get_haystack"]("repeat") == "REPEAT"
