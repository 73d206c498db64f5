from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.records import recorded
from tests.refusals import refused
from tests.small_assets import freeze_prompts

from residual_mass.benchmarks import generate
from residual_mass.benchmarks.catalogue import both_scores
from residual_mass.benchmarks.generate import cut_to, encoded
from residual_mass.decode.engine import SharedPrefillEngine
from residual_mass.files import jsonl, read_jsonl, sha256_of
from residual_mass.model.loading import load_backbone
from residual_mass.model.phi_maps import PhiMaps
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.settings import AnchorSpec, MapsSpec
from residual_mass.spec.specs import BackboneSpec, GenerateSpec
from residual_mass.texts.frozen_prompts import load_prompts

TASKS = ("ruler_cwe", "ruler_vt")


@pytest.fixture(scope="session")
def spec(backbone_spec: BackboneSpec) -> GenerateSpec:
    return GenerateSpec(
        study="test", backbone=backbone_spec, benchmark="ruler", length="1k", tasks=TASKS, examples=2,
        arms=(ArmSpec("full"), ArmSpec("topk", 3.0), ArmSpec("topk_phi", 3.0, "1k")), anchors=AnchorSpec(),
        budget_length="nominal", chat_template=False, truncate_to="1k", maps=(MapsSpec("1k", 1024),),
        answer_margin=0, stop_when_saturated=False, batch_tokens=1, allow_extrapolation=False, recipe=1,
    )  # fmt: skip


class Stage:
    """The generate stage on the small assets, counting what is decoded."""

    def __init__(self, assets: Path, manifest: Path, phi: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.assets, self.manifest, self.phi = assets, manifest, phi
        self.store, self.out = folder / "store.jsonl", folder / "all.jsonl"
        self.decoded: list[int] = []
        decode = SharedPrefillEngine.generate

        def counted(engine: SharedPrefillEngine, ids: list[list[int]], *others: Any) -> Any:
            self.decoded.append(len(ids))
            return decode(engine, ids, *others)

        monkeypatch.setattr(SharedPrefillEngine, "generate", counted)

    def __call__(self, spec: GenerateSpec) -> list[dict[str, Any]]:
        self.decoded.clear()
        generate.run(spec, self.assets, self.manifest, [self.phi] * len(spec.maps), self.store, self.out)
        return read_jsonl(self.out)


@pytest.fixture(scope="session")
def finished(
    spec: GenerateSpec, benchmark_assets: Path, manifest: Path, phi: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of one undisturbed run, with its store.jsonl and all.jsonl; read only."""
    folder = tmp_path_factory.mktemp("finished")
    generate.run(spec, benchmark_assets, manifest, [phi], folder / "store.jsonl", folder / "all.jsonl")
    return folder


@pytest.fixture
def stage(benchmark_assets: Path, manifest: Path, phi: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(benchmark_assets, manifest, phi, tmp_path, monkeypatch)


@pytest.fixture
def no_model(benchmark_assets: Path, tmp_path: Path) -> Path:
    """An assets folder with a configuration that names no model."""
    assets = tmp_path / "assets"
    shutil.copytree(benchmark_assets, assets)
    (config,) = assets.glob("models/*/config.json")
    config.write_text("{}")
    return assets


@pytest.fixture
def begun(stage: Stage, finished: Path) -> Stage:
    """The stage with the rows of the finished run in its store."""
    shutil.copy(finished / "store.jsonl", stage.store)
    return stage


def test_rows_are_complete_and_in_canonical_order(
    spec: GenerateSpec, finished: Path, manifest: Path, phi: Path, benchmark_assets: Path
) -> None:
    """That of the full arm is the model's own greedy decoding."""
    backbone = load_backbone(spec.backbone, benchmark_assets, torch.device("cpu"))
    rows = read_jsonl(finished / "all.jsonl")
    assert [(r["task"], r["index"], r["method"]) for r in rows] == [
        (task, index, arm.method) for task in TASKS for index in range(2) for arm in spec.arms
    ]
    for row in rows:
        prompt = load_prompts(manifest, row["task"], 2)[row["index"]]
        assert row["prompt_sha"] == prompt.sha256
        assert row["phi_sha"] == (sha256_of(phi) if row["method"] == "topk_phi" else None)
        assert row["budget_percent"] == (None if row["method"] == "full" else 3.0)
        assert row["method"] == "full" or row["k"] == 11  # ceil(3 % of 1024) - 20
        ids = backbone.tokenizer(prompt.prompt, return_tensors="pt").input_ids
        limit = len(backbone.tokenizer(" ".join(prompt.doc["outputs"])).input_ids)
        assert row["prompt_tokens"] == ids.shape[1]
        assert row["text"] == backbone.tokenizer.decode(row["tokens"], skip_special_tokens=True)
        if row["method"] == "full":
            expected = backbone.model.generate(ids, max_new_tokens=limit, do_sample=False)
            assert row["tokens"] == expected[0, ids.shape[1] :].tolist()
        assert len(row["tokens"]) == limit if row["finish"] == "length" else len(row["tokens"]) <= limit
    meta = json.loads((finished / "all.jsonl.meta.json").read_text())
    assert meta["device"] and meta["spec"]["tasks"] == list(TASKS)


def test_only_missing_rows_are_computed_and_end_as_the_same_bytes(
    spec: GenerateSpec, stage: Stage, finished: Path
) -> None:
    """Of a smaller study, then of a store with a torn line; the batches are others than those of the finished run."""
    small = replace(spec, tasks=("ruler_vt",), examples=1, arms=spec.arms[:2])
    spec = replace(spec, batch_tokens=2100, tasks=(*TASKS, "ruler_qa_hotpot"))  # the last is left out of the prompts
    first, stored = stage(small), stage.store.read_text()
    rows = stage(spec)
    assert stage.decoded == [2, 2] and stage.store.read_text().startswith(stored)
    assert stage.out.read_bytes() == (finished / "all.jsonl").read_bytes()
    assert stage(small) == first == [row for row in rows if row in first] and stage.decoded == []
    kept = [row for row in rows if (row["task"], row["index"], row["method"]) != ("ruler_vt", 1, "topk")]
    stage.store.write_text(jsonl(kept) + '{"torn')
    assert stage(spec) == rows and stage.decoded == [2]
    assert stage.store.read_text() == jsonl(kept) + jsonl(row for row in rows if row not in kept)


@pytest.mark.parametrize("field", ["task", "maps", "prompt_sha"])
def test_what_a_key_stands_for_is_not_read_from_the_store(
    spec: GenerateSpec, begun: Stage, finished: Path, field: str
) -> None:
    rows = read_jsonl(begun.store)
    begun.store.write_text(jsonl({**row, field: "`"} for row in rows))
    begun(spec)
    assert begun.decoded == [] and begun.out.read_bytes() == (finished / "all.jsonl").read_bytes()


@pytest.mark.parametrize(
    "change",
    [
        {"answer_margin": 1}, {"anchors": AnchorSpec(sink=5)}, {"budget_length": "real"}, {"recipe": 2},
        {"arms": (ArmSpec("topk", 4.0),)}, {"stop_when_saturated": True}, {"truncate_to": "512"},
        {"chat_template": True},
    ],
)  # fmt: skip
def test_what_determines_a_row_is_in_its_key(spec: GenerateSpec, begun: Stage, change: dict[str, Any]) -> None:
    spec = replace(spec, tasks=("ruler_vt",), examples=1, arms=(ArmSpec("topk", 3.0),))
    assert len(begun(spec)) == 1 and begun.decoded == []
    assert len(begun(replace(spec, **change))) == 1 and begun.decoded == [1]


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_the_files_of_a_model_are_in_its_keys(spec: GenerateSpec, begun: Stage, name: str, tmp_path: Path) -> None:
    spec = replace(spec, tasks=("ruler_vt",), examples=1, arms=(ArmSpec("topk", 3.0),))
    begun.assets = Path(shutil.copytree(begun.assets, tmp_path / "assets"))
    begun(spec)
    assert begun.decoded == []
    (path,) = begun.assets.glob(f"models/*/{name}")
    content = json.loads(path.read_text()) | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    path.write_text(json.dumps(content))
    begun(spec)
    assert begun.decoded == [1]


def test_maps_are_told_apart_by_their_content(spec: GenerateSpec, begun: Stage, finished: Path, tmp_path: Path) -> None:
    """Rows of the stored maps are kept under another label; those of others at their old label are computed."""
    before = [row for row in read_jsonl(finished / "all.jsonl") if row["method"] == "topk_phi"]
    maps = PhiMaps.load(begun.phi)
    maps.query[0].alpha.data.add_(1.0)
    maps.save(other := tmp_path / "other.safetensors")
    files = [recorded(other), begun.phi]
    both = replace(spec, arms=(ArmSpec("topk_phi", 3.0, "1k"), ArmSpec("topk_phi", 3.0, "old")))
    both = replace(both, maps=(*spec.maps, MapsSpec("old", 1024)))
    generate.run(both, begun.assets, begun.manifest, files, begun.store, begun.out)
    rows = read_jsonl(begun.out)
    assert [row | {"maps": "1k"} for row in rows if row["maps"] == "old"] == before
    assert not {row["key"] for row in rows if row["maps"] == "1k"} & {row["key"] for row in before}
    assert {row["maps"]: row["phi_sha"] for row in rows} == {"1k": sha256_of(other), "old": sha256_of(begun.phi)}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"benchmark": "babilong"}, "benchmark is ruler, not babilong"),
        ({"budget_length": "real", "truncate_to": "2k"}, "truncate_to 2k: longer than what the maps 1k"),
        ({"maps": (MapsSpec("1k", 512),)}, "longer than what the maps 1k were trained on (512)"),
        ({"examples": 3}, "has 2 examples per task, not 3"),
    ],
)
def test_wrong_request_is_refused_before_any_model_is_loaded(
    spec: GenerateSpec, stage: Stage, change: Any, complaint: str, no_model: Path
) -> None:
    stage.assets = no_model
    with refused(complaint):
        stage(replace(spec, **change))
    assert not stage.out.exists()


def test_the_saturation_stop_changes_no_score(spec: GenerateSpec, stage: Stage, tmp_path: Path) -> None:
    """References are taken from what the model itself generates, so that some of its rows are right."""
    spec = replace(spec, tasks=("ruler_vt",), answer_margin=None, batch_tokens=5000)  # all in one batch

    def asked_for(outputs: list[list[str]]) -> list[dict[str, Any]]:
        docs = [{"outputs": each, "max_length": 1024} for each in outputs]
        stage.manifest = freeze_prompts(tmp_path / "prompts" / "manifest.json", "ruler", "1k", {"ruler_vt": docs})
        rows = stage(spec)
        scores.append([both_scores("ruler", "ruler_vt", docs[row["index"]], row["text"])[0] for row in rows])
        return rows

    scores: list[list[float]] = []
    said = [row["text"] for row in asked_for([["none"], ["none"]]) if row["method"] == "full"]
    right = [[text[2:6].strip(), text[8:11].strip()] for text in said]
    free = asked_for(right)
    spec = replace(spec, stop_when_saturated=True)
    stopped = asked_for(right)
    assert scores[1] == scores[2] and max(scores[2]) == 1.0 and "saturated" in {row["finish"] for row in stopped}
    assert all(row["tokens"] == whole["tokens"][: len(row["tokens"])] for row, whole in zip(stopped, free, strict=True))
    assert sum(len(row["tokens"]) for row in stopped) < sum(len(row["tokens"]) for row in free)


def test_long_prompts_are_cut_behind_the_special_tokens(spec: GenerateSpec, begun: Stage) -> None:
    assert generate.cut_at("one\ntwo. three", [". ", "\n"]) == "one" and generate.cut_at("one", ["\n"]) == "one"
    assert cut_to([7, 1, 2, 3, 4], 3, [7]) == ([7, 3, 4], 2)
    assert cut_to([1, 2, 3, 4], 3, []) == ([2, 3, 4], 1)
    whole = begun(spec)
    for row, before in zip(begun(replace(spec, truncate_to="512")), whole, strict=True):
        limit = len(row["tokens"]) if row["finish"] == "length" else None
        assert row["cut_tokens"] == before["prompt_tokens"] - row["prompt_tokens"] > 0 == before["cut_tokens"]
        assert limit is None or row["prompt_tokens"] + limit == 512


def test_a_chat_template_surrounds_the_prompt_and_survives_the_cut(
    spec: GenerateSpec, stage: Stage, manifest: Path, tokenizer: Any
) -> None:
    spec = replace(spec, chat_template=True, tasks=("ruler_vt",), examples=1)
    prompt = load_prompts(manifest, "ruler_vt", 1)[0]
    text = f"<user>{prompt.prompt}</user>\n<assistant>"
    whole = encoded(spec, spec.truncate_to, prompt, tokenizer)
    assert tokenizer.decode(whole.ids) == text and whole.cut == 0
    limits = [encoded(replace(spec, answer_margin=margin), "2k", prompt, tokenizer).limit for margin in (None, 99, 1)]
    assert limits == [prompt.max_generation_tokens] * 2 + [whole.limit + 1]  # the harness's, or the references'
    cut = encoded(spec, "512", prompt, tokenizer)
    assert len(cut.ids) + cut.limit == 512 and cut.cut == len(whole.ids) - len(cut.ids)
    kept = tokenizer.decode(cut.ids)
    assert kept.startswith("<user>") and text.endswith(kept.removeprefix("<user>")) and len(kept) < len(text)
    assert {row["prompt_tokens"] for row in stage(spec)} == {len(whole.ids)}


def test_a_batch_holds_as_many_prompts_as_its_tokens(spec: GenerateSpec, begun: Stage) -> None:
    spec = replace(spec, tasks=("ruler_vt",), arms=spec.arms[:1])
    longest = max(row["prompt_tokens"] for row in begun(spec))
    for tokens, sizes in ((2 * longest, [2]), (2 * longest - 1, [1, 1]), (1, [1, 1])):
        begun.store.unlink()
        begun(replace(spec, batch_tokens=tokens))
        assert begun.decoded == sizes
