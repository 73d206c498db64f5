"""Whatever works with models refuses what no method works on in one line, before any work: every family that is
refused, by every way to bring a model in; and texts within which rotary frequencies change.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from residual_mass.model.supported import require_served
from tests.conftest import byte_tokenizer, save_tiny, tiny_llama
from tests.needs import KERNELS, TRANSFORMERS_5, needs
from tests.records import give_manifest
from tests.unit.measure.test_measuring import words
from tests.unit.model.families import FAMILIES, Family
from tests.unit.model.test_rotary import LONG
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from residual_mass import cli, partial_generate, partial_kv
from residual_mass.benchmarks import force
from residual_mass.decode.supported import require_served
from residual_mass.lm_eval import BadArgument, PartialKV
from residual_mass.model.loading import load_backbone
from residual_mass.runtime import latencies
from residual_mass.serve import answers as answers_module
from residual_mass.serve.answers import ServeSettings, open_answers
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.settings import AnchorSpec, MapSpec
from residual_mass.spec.specs import BackboneSpec, ForceSpec, RuntimeSpec

TWICE = Family("DiffLlama", "DiffLlamaForCausalLM", refusal="attends several times", arms="attends several times")
"""Only a call shows it."""
REFUSED = [family for family in (*FAMILIES, TWICE) if family.arms is not None]
CHOSEN = ("DiffLlama", "Mistral 0.1", "Gemma 2", "BLOOM", "Jamba")
"""One for each line, for ways that take longer."""
chosen = pytest.mark.parametrize(
    "family", [pytest.param(each, id=each.name) for each in REFUSED if each.name in CHOSEN]
)


BEYOND_256 = LONG | {"original_max_position_embeddings": 256}
CHANGES = (
    r"Phi3ForCausalLM's rotary frequencies change beyond 256 tokens \(longrope\), and this asks for texts of {}[^\n]* "
    r"tokens: keep prompts and answers on one side of 256 tokens"
)


class Folder:
    """A model in a folder of Hugging Face's format, with an assets folder in which it is the tiny model."""

    def __init__(self, model: PreTrainedModel, assets: Path, tmp_path: Path) -> None:
        self.assets = tmp_path / "assets"
        shutil.copytree(assets, self.assets)
        (self.path,) = (self.assets / "models").iterdir()
        shutil.rmtree(self.path)
        save_tiny(model, self.assets)
        give_manifest(self.assets)
        self.text = tmp_path / "a.txt"
        self.text.write_text(words(1, 3000))
        self.out = tmp_path / "out"


def measured(folder: Folder, *options: str) -> None:
    common = "--documents 2 --methods topk --budgets 25 --device cpu".split()
    where = ["--assets", str(folder.assets), "--out", str(folder.out)]
    cli.main(["measure", str(folder.path), str(folder.text), *(options or ("--length", "128")), *common, *where])


def forced(folder: Folder, spec: BackboneSpec, length: str = "128") -> None:
    arms = (ArmSpec("full"), ArmSpec("topk", 25.0))
    of_stage = ForceSpec(
        study="test", backbone=spec, length=length, corpora=("books",), documents=2, tokens=5, seed=0, asked=(),
        arms=arms, arms_of_documents=(), anchors=AnchorSpec(), truncate_to="1k", maps=(), recipe=1,
    )  # fmt: skip
    force.run(of_stage, folder.assets, [], [], folder.out / "store.jsonl", folder.out / "forced.parquet")


def served(model: PreTrainedModel) -> None:
    open_answers(model, ServeSettings("model", "full", 1.0, None, False, 100, None, "id"))


def line_of(capsys: pytest.CaptureFixture[str], work: Callable[[], None]) -> str:
    """The one line with which a command ends."""
    with pytest.raises(SystemExit) as ended:
        work()
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    lines = [line for line in printed.splitlines() if line.startswith("residual-mass measure: error: ")]
    assert len(lines) == 1 and "Traceback" not in printed
    return lines[0]


@chosen
def test_commands_and_stages(
    family: Family,
    benchmark_assets: Path,
    backbone_spec: BackboneSpec,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = Folder(family.build(vocab_size=258), benchmark_assets, tmp_path)
    said = f"{family.model} {family.arms}"
    assert said in line_of(capsys, lambda: measured(folder))
    spec = replace(backbone_spec, name="tiny")
    for work in (lambda: forced(folder, spec), lambda: load_backbone(spec, folder.assets, torch.device("cpu"))):
        with pytest.raises(ValueError, match=rf"^{said}[^\n]*$"):
            work()
    assert not (folder.out / "forced.parquet").exists()


@pytest.mark.parametrize("family", [pytest.param(each, id=each.name) for each in REFUSED if each.refusal])
def test_a_model_in_python(family: Family) -> None:
    model = family.build(vocab_size=258)
    line = rf"^[^\n]*{family.refusal}[^\n]*$"
    ids = torch.randint(2, 99, (1, 40), generator=torch.Generator().manual_seed(1))
    with pytest.raises(ValueError, match=line), partial_kv(model, "topk", 0.2):
        model.generate(ids, max_new_tokens=3)
    with pytest.raises(ValueError, match=line):
        partial_generate(model, ids, max_new_tokens=3, method="topk", budget=0.2)
    with pytest.raises(BadArgument, match=line):
        PartialKV(model, tokenizer=byte_tokenizer(), method="topk", budget=0.2, max_length=100)


@needs(KERNELS)
def test_a_server_opens_no_model_that_is_not_served() -> None:
    with pytest.raises(ValueError, match=r"^DiffLlamaForCausalLM attends several times[^\n]*$"):
        served(TWICE.build(hidden_size=256, head_dim=64))


def test_layers_that_bypass_the_attention_function() -> None:
    model = tiny_llama()
    layer = model.model.layers[1].self_attn
    layer.forward = lambda hidden_states, **options: (hidden_states, None)
    line = r"^LlamaForCausalLM bypasses transformers' attention interface in layers \[1\]$"
    with pytest.raises(BadArgument, match=line):
        PartialKV(model, tokenizer=byte_tokenizer(), method="topk", budget=0.2, max_length=100)
    with pytest.raises(ValueError, match=line):
        partial_generate(model, torch.ones(1, 40, dtype=torch.long), max_new_tokens=3, method="topk", budget=0.2)


@needs(TRANSFORMERS_5)
def test_layers_with_heads_of_their_own_widths() -> None:
    """partial_kv and our own loop serve them; what needs one shape refuses them."""
    model = Family("Gemma 4", "Gemma4UnifiedForCausalLM", {"num_key_value_heads": 4}).build()
    ids = torch.randint(2, 99, (1, 40), generator=torch.Generator().manual_seed(1))
    for method in ("full", "topk"):
        text = partial_generate(model, ids, max_new_tokens=6, method=method, budget=1.0)
        assert torch.equal(text, model.generate(ids, max_new_tokens=6, do_sample=False))
    with pytest.raises(ValueError, match=r"^Gemma4UnifiedTextConfig has no shape of heads for all layers \([^\n]*$"):
        require_served(model)


@pytest.mark.parametrize("option", ["softcap", "position_bias"])
def test_layers_that_ask_for_more_than_a_softmax(option: str) -> None:
    model = tiny_llama()
    layer = model.model.layers[1].self_attn
    forward = layer.forward
    layer.forward = lambda *args, **options: forward(*args, **options, **{option: 30.0})
    with pytest.raises(BadArgument, match=rf"^LlamaAttention uses {option}, which changes attention and is not supp"):
        PartialKV(model, tokenizer=byte_tokenizer(), method="topk", budget=0.2, max_length=100)


# ---- texts within which rotary frequencies change --------------------------------------------------------------------


@pytest.fixture
def longrope(benchmark_assets: Path, tmp_path: Path) -> Folder:
    """A model whose frequencies change beyond 256 tokens."""
    family = Family("LongRoPE", "Phi3ForCausalLM", {"sliding_window": None, "rope_parameters": BEYOND_256})
    sizes = {"vocab_size": 258, "hidden_size": 4 * 64, "head_dim": 64, "max_position_embeddings": 1024}
    model = family.build(**sizes, original_max_position_embeddings=256, pad_token_id=1)
    return Folder(model, benchmark_assets, tmp_path)


def test_commands_and_stages_refuse_texts_that_change_their_frequencies(
    longrope: Folder, backbone_spec: BackboneSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    said = line_of(capsys, lambda: measured(longrope, "--length", "200", "--tokens", "100"))
    assert "keep prompts and answers on one side of 256 tokens" in said
    said = line_of(capsys, lambda: measured(longrope, "--latency", "128", "256"))
    assert "asks for texts of 256 to 266 tokens" in said
    spec = replace(backbone_spec, name="tiny", context=1024)
    with pytest.raises(ValueError, match="^" + CHANGES.format("252 to 257") + "$"):
        forced(longrope, spec, "252")
    forced(longrope, spec, "251")
    forced(longrope, spec, "300")
    of_runtime = RuntimeSpec(
        study="test", backbone=spec, contexts=("128", "250"), batches=(1,), budget=20.0, anchors=AnchorSpec(),
        map=MapSpec(d_emb=24, d_phi=16), repeats=1, seed=0, recipe=1,
    )  # fmt: skip
    with pytest.raises(ValueError, match="^" + CHANGES.format("250 to 281") + "$"):
        latencies.run(of_runtime, longrope.assets, longrope.out / "runtime.csv")


@needs(KERNELS)
@needs(TRANSFORMERS_5)
def test_a_server_refuses_a_request_that_changes_frequencies(longrope: Folder) -> None:
    from residual_mass.serve import server

    model = AutoModelForCausalLM.from_pretrained(longrope.path)
    answers = open_answers(model, ServeSettings("model", "full", 1.0, None, False, 100, None, "id"))
    ids = torch.randint(2, 250, (1, 250), generator=torch.Generator().manual_seed(1))
    answers_module._answers[model] = answers
    before_a_stream = partial(server.prepare_header, model, {"input_ids": ids}, GenerationConfig(max_new_tokens=30))
    for work in (before_a_stream, lambda: answers.generate(model, ids, max_new_tokens=30)):
        with pytest.raises(ValueError, match="^" + CHANGES.format("250 to 279") + "$"):
            work()
    assert answers.generate(model, ids, max_new_tokens=7).shape[1] == 257
    assert [len(held) for held, _ in answers.kept.entries.values()] == [256]
    longer = torch.cat((ids, ids), 1)
    assert answers.generate(model, longer, max_new_tokens=7).shape[1] == 507
