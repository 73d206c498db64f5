from __future__ import annotations

import copy
import json
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from tests.records import recorded
from tests.refusals import refused
from tests.small_assets import freeze_prompts
from tests.unit.decode.reference import masked_logits

from residual_mass.benchmarks import force
from residual_mass.benchmarks.catalogue import harness_requests
from residual_mass.benchmarks.store import RowStore, StoredRow
from residual_mass.files import sha256_of
from residual_mass.model.loading import Backbone, load_backbone
from residual_mass.model.phi_maps import PhiMaps
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.settings import AnchorSpec, MapsSpec
from residual_mass.spec.specs import BackboneSpec, ForcedPromptsSpec, ForceSpec
from residual_mass.texts.corpora import held_out_corpus
from residual_mass.texts.frozen_prompts import gold_answer, gold_continuation, load_prompts

FULL, TOPK, PHI = ArmSpec("full"), ArmSpec("topk", 3.0), ArmSpec("topk_phi", 3.0, "1k")
SHORT = ArmSpec("topk_phi", 3.0, "512")
T = 5
RULER = ForcedPromptsSpec(
    benchmark="ruler", examples=1, chat_template=False, answer_margin=None, stop_when_saturated=False,
    budget_length="nominal", batch_tokens=1,
)  # fmt: skip
BABILONG = replace(RULER, benchmark="babilong", examples=5)
"""More than there are."""
DOCS: dict[str, dict[str, list[dict[str, Any]]]] = {
    "ruler": {
        "ruler_vt": [{"outputs": ["FERN", "SALT", "QUILL"]}, {"outputs": ["GLASS", "ROAD"]}],
        "ruler_qa_squad": [{"outputs": ["harbour town", "town"]}, {"outputs": ["nineteen"]}],
    },
    "babilong": {
        "babilong_qa1": [{"question": f"Where is {name}?", "target": "harbour"} for name in ("Mary", "Daniel")]
    },
}
CONTINUATION = ["text", "task", "index", "continuation"]
ROW = [*CONTINUATION, "state", "method", "maps"]
EXAMPLES = [
    ("ruler", "ruler_vt", 0),
    ("ruler", "ruler_qa_squad", 0),
    *(("babilong", "babilong_qa1", i) for i in (0, 1)),
]
"""That are asked for."""


@pytest.fixture(scope="module")
def spec(backbone_spec: BackboneSpec) -> ForceSpec:
    return ForceSpec(
        study="test", backbone=backbone_spec, length="1k", corpora=("books",), documents=2, tokens=T, seed=0,
        asked=(RULER, BABILONG), arms=(FULL, TOPK, PHI), arms_of_documents=(SHORT,), anchors=AnchorSpec(),
        truncate_to="1k", maps=(MapsSpec("1k", 1024), MapsSpec("512", 512)), recipe=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def backbone(backbone_spec: BackboneSpec, benchmark_assets: Path) -> Backbone:
    return load_backbone(backbone_spec, benchmark_assets, torch.device("cpu"))


@pytest.fixture(scope="session")
def short_phi(phi: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other maps."""
    maps = PhiMaps.load(phi)
    maps.query[0].alpha.data.add_(1.0)
    maps.save(path := tmp_path_factory.mktemp("phi") / "tiny_512.safetensors")
    return recorded(path)


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Frozen prompts of both benchmarks."""
    folder = tmp_path_factory.mktemp("prompts")
    return [freeze_prompts(folder / name / "manifest.json", name, "1k", docs) for name, docs in DOCS.items()]


class Stage:
    """The force stage on the small assets."""

    def __init__(self, assets: Path, manifests: Sequence[Path], phi: Sequence[Path], folder: Path) -> None:
        self.assets, self.manifests, self.phi = assets, manifests, list(phi)
        self.store, self.out = folder / "store.jsonl", folder / "forced.parquet"

    def __call__(self, spec: ForceSpec) -> pd.DataFrame:
        manifests, phi = self.manifests[: len(spec.asked)], self.phi[: len(spec.maps)]
        force.run(spec, self.assets, manifests, phi, self.store, self.out)
        return pd.read_parquet(self.out)

    def computed(self, spec: ForceSpec) -> int:
        """Rows that a run computes."""
        self(spec)
        return json.loads(self.out.with_name("forced.parquet.meta.json").read_text())["rows_computed"]

    def ids(self, tokenizer: Any, text: str, task: str, index: int) -> list[int]:
        """Those of a prompt."""
        manifest = self.manifests[list(DOCS).index(text)]
        return tokenizer(load_prompts(manifest, task, index + 1)[index].prompt).input_ids


@pytest.fixture(scope="module")
def undisturbed(
    spec: ForceSpec, benchmark_assets: Path, manifests: list[Path], phi: Path, short_phi: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Stage:  # fmt: skip
    """A stage that has run; read only."""
    stage = Stage(benchmark_assets, manifests, [phi, short_phi], tmp_path_factory.mktemp("undisturbed"))
    stage(spec)
    return stage


@pytest.fixture(scope="module")
def finished(undisturbed: Stage) -> pd.DataFrame:
    return pd.read_parquet(undisturbed.out)


@pytest.fixture
def stage(undisturbed: Stage, tmp_path: Path) -> Stage:
    return Stage(undisturbed.assets, undisturbed.manifests, undisturbed.phi, tmp_path)


@pytest.fixture
def begun(stage: Stage, undisturbed: Stage) -> Stage:
    """The stage with the rows of the undisturbed run in its store."""
    shutil.copy(undisturbed.store, stage.store)
    return stage


def documents(spec: ForceSpec, backbone: Backbone, assets: Path) -> list[list[int]]:
    corpus = held_out_corpus("books", backbone.tokenizer, 1024 + 1 + T, spec.seed, assets)
    return corpus.disjoint(spec.documents)


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_there_is_a_row_for_each_token_in_canonical_order(finished: pd.DataFrame, phi: Path, short_phi: Path) -> None:
    decoded = [("own", FULL), ("own", TOPK), ("own", PHI)]
    both = [*decoded, ("own", SHORT), ("dense", TOPK), ("dense", PHI)]
    assert finished[ROW].drop_duplicates().values.tolist() == [
        *(["books", "", i, "following", state, arm.method, arm.maps or ""] for i in (0, 1) for state, arm in both),
        *(
            [*example, kind, state, arm.method, arm.maps or ""]
            for example in EXAMPLES for kind in ("gold", "greedy") for state, arm in decoded
        ),
    ]  # fmt: skip
    for _, rows in finished.groupby(ROW, sort=False):
        assert list(rows.position) == list(range(len(rows))) and 0 < len(rows) <= T
    for _, rows in finished.groupby(CONTINUATION, sort=False):
        assert rows.groupby("position").token.nunique().eq(1).all()  # all arms have the same tokens
    shas = dict(zip(finished.maps, finished.phi_sha, strict=True))
    assert shas == {"": "", "1k": sha256_of(phi), "512": sha256_of(short_phi)}
    partial = finished[finished.method != "full"]
    assert set(partial.k) == {11} and set(partial.budget_percent) == {3.0}  # ceil(3 % of 1024) - 20
    assert finished[finished.method == "full"].budget_percent.isna().all()


def test_answers_are_the_right_one_and_full_s_own(
    finished: pd.DataFrame, undisturbed: Stage, backbone: Backbone
) -> None:
    golds = []
    for text, task, index in EXAMPLES:
        rows = finished[(finished.task == task) & (finished["index"] == index) & (finished.method == "full")]
        gold = backbone.tokenizer(gold_continuation(task, DOCS[text][task][index])).input_ids
        golds.append(len(gold))
        assert rows[rows.continuation == "gold"].token.tolist() == gold[:T]
        ids = torch.tensor([undisturbed.ids(backbone.tokenizer, text, task, index)])
        own = backbone.model.generate(ids, max_new_tokens=T, do_sample=False)[0, ids.shape[1] :].tolist()
        greedy = rows[rows.continuation == "greedy"]
        assert greedy.token.tolist() == own and greedy["first"].all()
    assert min(golds) < T < max(golds)


def logs(model: Any, prompt: list[int], answer: Sequence[int]) -> torch.Tensor:
    """Log-probabilities [T, V] of the answer's tokens, from one pass over the whole text."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].double().log_softmax(-1)


def test_full_is_the_plain_model(
    spec: ForceSpec, finished: pd.DataFrame, undisturbed: Stage, backbone: Backbone
) -> None:
    texts = documents(spec, backbone, undisturbed.assets)
    for (text, task, index, _), rows in finished.groupby(CONTINUATION, sort=False):
        full = rows[rows.method == "full"]
        prompt = undisturbed.ids(backbone.tokenizer, text, task, index) if task else texts[index][: 1024 + 1]
        answer = full.token.tolist()
        assert task or answer == texts[index][1024 + 1 :]
        plain = logs(backbone.model, prompt, answer)
        expected = -plain[range(len(answer)), answer]
        torch.testing.assert_close(torch.tensor(full.nll.values), expected, atol=1e-4, rtol=0)
        assert (full.kl == 0).all() and full.same_top.all() and (full.nll == full.full_nll).all()
        assert full["first"].tolist() == (plain.argmax(-1) == torch.tensor(answer)).tolist()
        assert full.k.unique().tolist() == [len(prompt) - 1 - 20]  # the last token of the prompt is decoded
        arms = rows[rows.method != "full"].groupby(["state", "method", "maps"])
        assert arms.full_nll.apply(tuple).nunique() == 1 and arms.kl.mean().min() > 0
        assert set(rows[rows.method != "full"].full_nll) == set(full.nll)


def test_topk_is_the_plain_model_under_a_mask(
    spec: ForceSpec, finished: pd.DataFrame, backbone: Backbone, benchmark_assets: Path
) -> None:
    """The first token is masked as well: the last one before it is decoded under the arm."""
    ids = documents(spec, backbone, benchmark_assets)[1]
    prompt, answer = ids[: 1024 + 1], ids[1024 + 1 :]
    full = logs(backbone.model, prompt, answer)
    masked = masked_logits(backbone.model, [*prompt, *answer], 1024, 11, AnchorSpec())
    arm = masked[len(prompt) - 1 : -1].double().log_softmax(-1)
    of_document = finished[(finished.text == "books") & (finished["index"] == 1) & (finished.method == "topk")]
    rows = of_document[of_document.state == "own"]
    kl = torch.nn.functional.kl_div(arm, full, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(torch.tensor(rows.kl.values), kl, atol=1e-5, rtol=1e-2)
    torch.testing.assert_close(torch.tensor(rows.nll.values), -arm[range(T), answer], atol=1e-4, rtol=0)
    assert rows.same_top.tolist() == (arm.argmax(-1) == full.argmax(-1)).tolist()
    dense = of_document[of_document.state == "dense"]
    assert dense.kl.iloc[0] == pytest.approx(rows.kl.iloc[0], abs=1e-6)
    assert (dense.kl.values[1:] != rows.kl.values[1:]).all()


def test_budgets_of_the_prompt_s_own_length(spec: ForceSpec, stage: Stage, backbone: Backbone) -> None:
    """Documents keep that of the label."""
    asked = replace(RULER, budget_length="real", examples=2), BABILONG
    rows = stage(replace(spec, arms=(ArmSpec("topk", 12.0),), documents=1, arms_of_documents=(), asked=asked))
    for (text, task, index), ks in rows.groupby(["text", "task", "index"]).k:
        own = len(stage.ids(backbone.tokenizer, text, task, index)) - 1 if text == "ruler" else 1024
        assert set(ks) == {math.ceil(0.12 * own) - 20} and min(ks) > 0
    assert rows.k.nunique() > 2


# ---- right answers ---------------------------------------------------------------------------------------------------


def test_right_answers() -> None:
    assert gold_answer("niah_multivalue", {"outputs": ["1", "22", "3"]}) == "1, 22, 3"
    assert gold_answer("ruler_cwe", {"outputs": ["one", "two"]}) == "1. one 2. two"
    assert gold_answer("ruler_qa_squad", {"outputs": ["Ada Moreau", "Moreau"]}) == "Ada Moreau"
    assert gold_answer("longbench_qmsum", {"answers": [" One. Two.\n", "Other"], "question": "Q?"}) == "One. Two."


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_babilong_is_answered_as_its_prompt_s_examples_are(number: int) -> None:
    task = f"babilong_qa{number}"
    doc = {"input": "Nobody went.", "question": "Where is Mary?", "target": "office"}
    ((prompt, _),) = harness_requests("babilong", task, [doc])
    examples = re.findall(r"^(W\w+ .*\?) (.+)$", prompt, re.MULTILINE)
    assert len(examples) >= 2
    for question, answer in examples:
        target = re.search(r"(\w+)\.?$", answer)[1]
        assert gold_answer(task, {"question": question, "target": target}) == answer


def test_a_chat_template_s_answer_begins_without_a_blank(spec: ForceSpec, stage: Stage, backbone: Backbone) -> None:
    asked = (replace(RULER, chat_template=True),)
    rows = stage(replace(spec, corpora=(), arms=(FULL,), maps=(), arms_of_documents=(), asked=asked))
    (prompt,) = load_prompts(stage.manifests[0], "ruler_vt", 1)
    gold = rows[(rows.task == "ruler_vt") & (rows.continuation == "gold")]
    answer = backbone.tokenizer("FERN SALT QUILL").input_ids[:T]
    assert gold.token.tolist() == answer
    whole = backbone.tokenizer(f"<user>{prompt.prompt}</user>\n<assistant>").input_ids
    expected = -logs(backbone.model, whole, answer)[range(T), answer]
    torch.testing.assert_close(torch.tensor(gold.nll.values), expected, atol=1e-4, rtol=0)


def test_tokens_and_bigrams_of_the_prompt_are_told_apart() -> None:
    def seen(prompt: tuple[int, ...], answer: tuple[int, ...]) -> list[int]:
        return list(force.Continuation("ruler", "niah", 0, "gold", prompt, answer, 9, None, ()).seen(answer))

    assert seen((7, 8, 9, 7), (8, 9, 5, 9, 8)) == [2, 2, 0, 1, 1]
    assert seen((7, 8), (8, 8, 7)) == [1, 1, 1]  # what the answer itself repeats does not count
    assert seen((7,), (8,)) == [0]


# ---- rows are computed once ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [4, 15])
def test_an_interrupted_run_goes_on_to_the_same_bytes(
    spec: ForceSpec, stage: Stage, undisturbed: Stage, whole: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With so many rows in the store, and the next one torn: after a state of a document, and a prompt."""
    append = RowStore.append

    def interrupted(store: RowStore, rows: list[StoredRow]) -> None:
        append(store, rows)
        if len(store.rows) == whole:
            raise KeyboardInterrupt

    monkeypatch.setattr(RowStore, "append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stage(spec)
    assert not stage.out.exists()
    lines = undisturbed.store.read_bytes().splitlines(keepends=True)
    assert stage.store.read_bytes() == b"".join(lines[:whole])
    stage.store.write_bytes(stage.store.read_bytes() + lines[whole][:-9])
    monkeypatch.undo()
    assert stage.computed(spec) == len(lines) - whole
    assert stage.out.read_bytes() == undisturbed.out.read_bytes()
    assert stage.store.read_bytes() == undisturbed.store.read_bytes()


def test_what_is_added_is_all_that_is_computed(spec: ForceSpec, begun: Stage, undisturbed: Stage) -> None:
    before = pd.read_parquet(undisturbed.out)
    wider = replace(spec, arms=(*spec.arms, ArmSpec("topk", 7.5)))
    assert begun.computed(wider) == 2 * 2 + 4 * 2  # two states of two documents, two answers to four prompts
    kept = pd.read_parquet(begun.out).query("budget_percent != 7.5").reset_index(drop=True)
    pd.testing.assert_frame_equal(kept, before)
    assert begun.computed(replace(spec, documents=3)) == 6
    assert begun.computed(replace(spec, asked=(replace(RULER, examples=2), BABILONG))) == 2 * 2 * 3
    assert begun.computed(spec) == 0 and begun.out.read_bytes() == undisturbed.out.read_bytes()
    narrow = replace(spec, corpora=(), arms=(TOPK,), arms_of_documents=(), asked=(RULER,))
    assert begun.computed(narrow) == 0 and begun.computed(replace(narrow, tokens=1)) == 4
    assert begun.computed(replace(narrow, asked=(replace(RULER, budget_length="real"),))) == 4


def test_a_method_that_chooses_no_tokens_is_the_same_at_every_budget(spec: ForceSpec, stage: Stage) -> None:
    """And beside methods that do, whose numbers follow their budgets."""
    arms = [ArmSpec(name, budget) for budget in (3.0, 7.5) for name in ("cache8", "topk", "cache4_rotated")]
    frame = stage(replace(spec, arms=(FULL,), arms_of_documents=tuple(arms), asked=(), maps=()))
    three, more = (frame[frame.budget_percent == budget].set_index([*ROW, "position"]).kl for budget in (3.0, 7.5))
    same = (three == more).groupby("method").all()
    assert same.to_dict() == {"cache4_rotated": True, "cache8": True, "topk": False}
    means = three.groupby("method").mean()
    assert 0 < means.cache8 < means.cache4_rotated  # each has its own numbers


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_maps_and_models_that_do_not_fit_are_named(
    spec: ForceSpec, stage: Stage, backbone: Backbone, tmp_path: Path
) -> None:
    spec = replace(spec, documents=1, asked=())
    with refused("arm topk_phi: maps '512' is not in spec.maps, which has 1k"):
        stage(replace(spec, maps=spec.maps[:1]))
    maps = PhiMaps.load(stage.phi[1])
    maps.query[1].out_bias.data[:] = maps.query[1].out.data[:] = 3e38
    maps.save(tmp_path / "wrong.safetensors")
    stage.phi[1] = recorded(tmp_path / "wrong.safetensors")
    with refused("books document 0: the logits of the continuation under topk_phi with the maps 512, from layer 1 on"):
        stage(spec)
    shutil.copytree(stage.assets, tmp_path / "assets")
    stage.assets = tmp_path / "assets"
    narrow = copy.deepcopy(backbone.model)
    narrow.resize_token_embeddings(300)
    narrow.save_pretrained(stage.assets / "models" / "tiny-llama")
    with refused("tiny: the texts hold token ", ", but the model has 300 tokens; give the model the tokenizer that"):
        stage(spec)
    assert not stage.out.exists()
