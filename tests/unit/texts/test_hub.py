"""Prefetching from a small local hub: offline reads give the same as online reads, and missing files are named."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import lm_eval.tasks
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.conftest import byte_tokenizer, tiny_llama
from tests.small_hub import Repository, SmallHub, become, serving
from tests.unit.model.gguf_files import write_gguf

from residual_mass import load_gguf
from residual_mass.benchmarks import ruler
from residual_mass.benchmarks.catalogue import harness_config
from residual_mass.benchmarks.prompts import examples_of
from residual_mass.files import sha256_of, write_json
from residual_mass.model.loading import load_backbone
from residual_mass.spec.specs import BackboneSpec, PromptsSpec
from residual_mass.spec.tasks import BENCHMARKS, parts_of, tasks_of
from residual_mass.spec.texts import BABILONG, ESSAYS, HUB, LONGBENCH, REVISIONS, HubPart
from residual_mass.study.prefetch import hub_needs, missing
from residual_mass.texts.corpora import held_out_corpus, training_corpus
from residual_mass.texts.hub import commits_of, one_line_hub_errors, prefetch

PROMPTS = PromptsSpec(
    "babilong", "4k", "bytes", "", "", "hub", "hub", examples=9, seed=0, recipe=1, tasks=tasks_of("babilong", 4096)
)
TOKEN = "hf_never_to_be_seen"
COMMIT = "c0ffee" + "0" * 34
MODEL = "org/Small-Llama"
SPEC = BackboneSpec("paper", MODEL, COMMIT, "hub", "float32", "bytes", 2048, False, name="small")
PARTS = [HUB["fineweb"], HUB["wikitext"], HubPart(BABILONG, "4k", "qa1"), HubPart(LONGBENCH, "gov_report", "test")]


def parquet(rows: list[dict[str, Any]]) -> bytes:
    stream = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), stream)
    return stream.getvalue()


def data_set(name: str, files: dict[str, bytes], **configurations: dict[str, str]) -> dict[str, Repository]:
    """With a README, which says what the files of each configuration are."""
    listed = [
        {"config_name": name, "data_files": [{"split": split, "path": path} for split, path in files.items()]}
        for name, files in configurations.items()
    ]
    readme = {"README.md": f"---\nconfigs: {json.dumps(listed)}\n---\n".encode()} if listed else {}
    return {f"datasets/{name}": Repository(REVISIONS.get(name, COMMIT), readme | files)}


@pytest.fixture(scope="session")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Repository]:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(layers=1).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    model = {file.name: file.read_bytes() for file in folder.iterdir()}
    model |= {"original/consolidated.00.pth": b"not wanted", "pytorch_model.bin": b"nor this", "LICENSE.txt": b"yes"}
    text = {f"sample/{n}.parquet": parquet([{"text": f"<{n}.{i}:{'x' * 40}>"} for i in range(20)]) for n in range(3)}
    lines = {"lines/test-0.parquet": parquet([{"text": f"Line {number}.\n"} for number in range(80)])}
    stories = {
        f"data/{task}/4k.parquet": parquet([{"input": f"{task} {n}", "question": "?", "target": "x"} for n in range(4)])
        for task in ("qa1", "qa2")
    }
    report = {"gov_report/test.jsonl": b'{"context": "a", "answers": ["b"]}\n' * 3}
    return {
        f"models/{MODEL}": Repository(COMMIT, model),
        **data_set(HUB["fineweb"].data_set, text, **{"sample-10BT": {"train": "sample/*"}}),
        **data_set(HUB["wikitext"].data_set, lines, **{"wikitext-103-raw-v1": {"test": "lines/test-*"}}),
        **data_set(BABILONG, stories, **{"4k": {task: f"data/{task}/4k*" for task in ("qa1", "qa2")}}),
        **data_set(LONGBENCH, report, gov_report={"test": "gov_report/test*"}),
        **data_set(ESSAYS.data_set, {"essays.parquet": parquet([{"text": "One  essay."}, {"text": "Another."}])}),
    }


@pytest.fixture
def hub(repositories: dict[str, Repository], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallHub]:
    """The libraries' hub for one test, with empty caches."""
    with serving(SmallHub({name: replace(each) for name, each in repositories.items()})) as small:
        become(small, tmp_path, monkeypatch)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
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


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as caught:
        call()
    assert "\n" not in str(caught.value) and TOKEN not in str(caught.value)
    return str(caught.value)


def test_offline_equals_online(
    hub: SmallHub, shut: Callable[[SmallHub], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def read() -> dict[str, Any]:
        trained = training_corpus(["fineweb"], byte_tokenizer(), 64, 0, tmp_path)
        held_out = held_out_corpus("wikitext", byte_tokenizer(), 50, 0, tmp_path)
        backbone = load_backbone(SPEC, tmp_path, torch.device("cpu"))
        return {
            "train": [trained.sequence(i) for i in range(20)],
            "held out": held_out.disjoint(3),
            "weights": {name: tensor.sum().item() for name, tensor in backbone.model.state_dict().items()},
            "tokens": backbone.encode("Some text."),
            "identity": backbone.identity,
            "stories": examples_of(replace(PROMPTS, examples=3), "babilong_qa1", None, tmp_path),
            "reports": examples_of(replace(PROMPTS, benchmark="longbench"), "longbench_gov_report", None, tmp_path),
            "commits": commits_of(PARTS),
        }

    with caplog.at_level(logging.INFO):
        prefetch([(MODEL, COMMIT)], PARTS)
    online = read()
    assert online["stories"] == [{"input": f"qa1 {n}", "question": "?", "target": "x"} for n in range(3)]
    assert online["reports"] == [{"context": "a", "answers": ["b"]}] * 3
    wikitext = HUB["wikitext"].data_set
    assert online["commits"] == {part.data_set: REVISIONS.get(part.data_set, COMMIT) for part in PARTS}
    assert online["commits"][wikitext] != COMMIT and "60 rows at commit c0ffee" in caplog.text
    shut(hub)
    assert read() == online
    prefetch([(MODEL, COMMIT)], PARTS)  # now a check
    assert hub.fetched == [] and hub.tokens == set()  # nobody so much as asked
    cached = {path.name for path in (tmp_path / "hub cache").rglob("*")}
    assert {"model.safetensors", "config.json", "tokenizer.json", "LICENSE.txt"} <= cached
    assert not {"pytorch_model.bin", "consolidated.00.pth"} & cached
    written = (path for path in tmp_path.rglob("*") if path.is_file())
    assert TOKEN not in caplog.text + "".join(path.read_text("latin-1") for path in written)


def test_a_gguf_file_of_the_hub(hub: SmallHub, shut: Callable[[SmallHub], None], tmp_path: Path) -> None:
    """It is fetched once, is checked by its hash, and is then a model without network."""
    local = tmp_path / "tiny.gguf"
    write_gguf(local, tiny_llama(), lambda name: "Q8_0" if "embed" in name else "Q4_0")
    name = "org/Tiny-GGUF/tiny.gguf"
    hub.repositories["models/org/Tiny-GGUF"] = Repository(COMMIT, {"tiny.gguf": local.read_bytes()})
    assert "org/Tiny-GGUF/other.gguf: the hub no longer has" in error_of(
        lambda: prefetch([("org/Tiny-GGUF/other.gguf", "0")], [])
    )
    wrong = error_of(lambda: prefetch([(name, "0" * 64)], []))
    assert f"its SHA-256 is {sha256_of(local)}, not {'0' * 64}; fetch the file again" in wrong
    prefetch([(name, sha256_of(local))], [])
    shut(hub)
    prefetch([(name, sha256_of(local))], [])  # now a check
    assert "model org/Tiny-GGUF/other.gguf at 0" in error_of(lambda: prefetch([("org/Tiny-GGUF/other.gguf", "0")], []))
    spec = replace(SPEC, model_id=name, revision=sha256_of(local), source="gguf")
    loaded = load_backbone(spec, tmp_path, torch.device("cpu")).model
    own, _ = load_gguf(local, torch.float32)
    ids = torch.arange(2, 40)[None]
    assert torch.equal(loaded(ids).logits, own(ids).logits)


def test_everything_that_is_missing_offline_is_one_line(
    hub: SmallHub, shut: Callable[[SmallHub], None], tmp_path: Path
) -> None:
    write_json(tmp_path / "manifest.json", {"pins": {}, "files": [{"path": "qa/squad.json", "sha256": "0"}]})
    prefetch([], [HUB["wikitext"]])
    shut(hub)
    backbone = {"model_id": MODEL, "revision": COMMIT, "source": "hub"}
    folder, cache = missing([{"backbone": backbone, "corpora": ["fineweb"], "held_out": ["wikitext"]}], tmp_path)
    assert (
        folder == f"offline, and the assets folder lacks {tmp_path}/qa/squad.json; copy it from a machine with network"
    )
    assert cache.startswith(
        f"offline, and the cache of the hub lacks: model {MODEL} at {COMMIT}; data set HuggingFaceFW"
    )
    assert "wikitext" not in cache and "the same HF_HOME or a copy of it" in cache
    write_json(tmp_path / "manifest.json", {"pins": {}, "files": []})
    assert missing([{"backbone": backbone | {"source": "assets"}, "corpora": ["wiki"]}], tmp_path) == []


def test_everything_that_asks_for_access_is_named_at_once(hub: SmallHub) -> None:
    hub.repositories[f"models/{MODEL}"].gated = True
    del hub.repositories[f"datasets/{LONGBENCH}"]
    line = error_of(lambda: prefetch([(MODEL, COMMIT)], PARTS))
    assert f"{MODEL}: access is restricted: accept its licence" in line and "HF_TOKEN" in line
    assert f"{LONGBENCH}: not on the hub, or private" in line and BABILONG not in line


def test_weights_must_be_safetensors_and_errors_do_not_hold_the_token(hub: SmallHub) -> None:
    hub.status = 503
    line = error_of(lambda: prefetch([(MODEL, COMMIT)], []))
    assert line.startswith(f"{MODEL}: cannot be fetched (") and line.endswith("prefetch again, which resumes")

    def ask() -> None:
        with one_line_hub_errors(MODEL):
            raise ConnectionError(f"the proxy refused Bearer {TOKEN}")

    assert "the proxy refused Bearer (the token)" in error_of(ask)
    hub.status = 200
    hub.repositories[f"models/{MODEL}"].files = {"config.json": b"{}", "pytorch_model.bin": b"pickle"}
    assert "has no safetensors weights; choose another" in error_of(lambda: prefetch([(MODEL, COMMIT)], []))


def test_needs_are_read_from_the_specs_of_jobs() -> None:
    backbone = {"model_id": MODEL, "revision": COMMIT, "source": "hub", "tokenizer": "bytes"}
    train = {"backbone": backbone, "length": "1k", "corpora": ["sotu", "fineweb"], "held_out": ["wikitext", "books"]}
    prompts = {"benchmark": "babilong", "length": "4k", "tokenizer_source": "assets", "data_source": "hub"}
    scored = {"benchmark": "ruler", "data_source": "hub", "backbone": backbone, "length": "4k"}
    force = {"backbone": {"source": "assets"}, "corpora": ["wikitext", "books"]}
    figure = {"corpus": "fineweb", "length": "4k"}  # read out of captured files
    models, parts = hub_needs([train, prompts, scored, force, figure])
    assert models == [(MODEL, COMMIT)]
    assert parts == [HUB["fineweb"], HUB["wikitext"], *(HubPart(BABILONG, "4k", f"qa{n}") for n in range(1, 6))]
    assert hub_needs([figure, {"backbone": backbone | {"source": "assets"}}]) == ([], [])


def test_parts_are_those_that_the_harness_reads() -> None:
    for task in BENCHMARKS["longbench"]:
        config = harness_config("longbench", task.name)
        part = HubPart(config["dataset_path"], config["dataset_name"], config["test_split"])
        assert part in parts_of("longbench", 65536).values()
    config = harness_config("babilong", "babilong_qa3")
    assert HubPart(config["dataset_path"], "64k", config["test_split"]) in parts_of("babilong", 65536).values()
    assert set(parts_of("ruler", 4096).values()) == {ESSAYS}
    assert error_of(lambda: parts_of("babilong", 1536)).endswith("has whole k only; choose 1k, 2k, 4k, ...")
    haystack = Path(lm_eval.tasks.__file__).with_name("ruler") / "prepare_niah.py"
    assert f'load_dataset("{ESSAYS.data_set}", split="{ESSAYS.split}")' in haystack.read_text()


@pytest.mark.slow
def test_ruler_of_the_hub_reads_the_prefetched_essays(
    hub: SmallHub, shut: Callable[[SmallHub], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nltk_data/tokenizers/punkt_tab/english").mkdir(parents=True)
    prefetch([], [ESSAYS])
    shut(hub)
    line = error_of(lambda: ruler.harness_data(tmp_path))
    assert line.endswith("squad.json: not the file that the harness downloads (sha256); run the assets stage")
    monkeypatch.setattr(ruler, "QUESTIONS", {})
    assert ruler.harness_data(tmp_path).essays() == "One  essay. Another."
