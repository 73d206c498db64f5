"""A compiled step, against the model itself: the same logits, and one graph for all texts."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from tests.needs import COMPILED, KERNELS, needs
from tests.unit.model.families import FAMILIES, Family, cases
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, DogeConfig, DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.generation import (
    BaseStreamer,
    MaxLengthCriteria,
    PrefixConstrainedLogitsProcessor,
    TemperatureLogitsWarper,
    TextStreamer,
)

from residual_mass import PackedCache, partial_decoding, partial_generate
from residual_mass.decode import compiled
from residual_mass.decode.backends import backend_for
from residual_mass.decode.text import Text
from residual_mass.methods.arms import arm_of
from residual_mass.timing import StepClock

pytestmark = needs(COMPILED)

SCAN = "scan4_regression_64"


def small_model(model_class: type[LlamaForCausalLM] = LlamaForCausalLM) -> LlamaForCausalLM:
    """One layer, in float64, so that the order of operations in a graph flips no 8-bit code."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=101, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=4096, initializer_range=0.2, bos_token_id=0,
        eos_token_id=None, pad_token_id=1,
    )  # fmt: skip
    return model_class(config).double().eval()


def ids_of(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(2, 97, shape, generator=torch.Generator().manual_seed(seed))


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def answered(model: PreTrainedModel, ids: Tensor, tokens: int, compile: bool | str, method: str, **options):  # noqa: ANN003, ANN201
    options.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(
        ids,
        max_new_tokens=tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        custom_generate=partial_decoding(method, None if method == "full" else 0.1, compile=compile),
        **options,
    )


def assert_same(ours, theirs, tolerance: float = 2e-3) -> None:  # noqa: ANN001
    """Logits agree to a flipped code (frequencies of rotary embeddings are float32), and so do tokens up to a tie."""
    for own, their in zip(ours.logits, theirs.logits, strict=True):
        torch.testing.assert_close(own, their, atol=tolerance, rtol=0)
        if not torch.equal(own.argmax(-1), their.argmax(-1)):
            return
    assert torch.equal(ours.sequences, theirs.sequences)


@needs(KERNELS)
def test_texts_that_grow_over_turns_and_files_take_one_graph(tmp_path: Path) -> None:
    model = small_model()
    before = graphs()
    caches = {compile: PackedCache(model, SCAN) for compile in (True, False)}
    texts = {compile: ids_of(1, 150) for compile in (True, False)}
    for turn, tokens in enumerate((500, 20, 20)):
        outputs = {}
        for compile in (True, False):
            outputs[compile] = answered(model, texts[compile], tokens, compile, SCAN, past_key_values=caches[compile])
            more = ids_of(1, 30, seed=turn)
            texts[compile] = torch.cat((outputs[compile].sequences, more), 1)
            caches[compile].save(tmp_path / "state.safetensors")
            caches[compile] = PackedCache(model, SCAN).load(tmp_path / "state.safetensors")
        assert_same(outputs[True], outputs[False])
    short = ids_of(1, 9)
    for method in ("full", "topk_moments", SCAN):
        assert_same(answered(model, short, 12, True, method), answered(model, short, 12, False, method))
    assert graphs() == before + 1


def test_a_padded_batch_takes_one_graph() -> None:
    model = small_model()
    before = graphs()
    for length in (20, 33):
        ids = ids_of(2, length)
        mask = torch.ones_like(ids)
        mask[0, :7] = 0
        options = {"attention_mask": mask, "past_key_values": DynamicCache()}
        ours = answered(model, ids, 70, True, "topk_moments", **options)
        options["past_key_values"] = DynamicCache()
        assert_same(ours, answered(model, ids, 70, False, "topk_moments", **options))
    assert graphs() == before + 1


def test_texts_of_many_tokens_are_compiled_by_themselves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiled, "cache_dir", lambda: str(tmp_path))
    monkeypatch.setattr(compiled, "REPAID", 30)
    monkeypatch.setattr(compiled, "REPAID_FROM_DISK", 20)
    model = small_model()
    before = graphs()
    for tokens, made in ((29, 0), (30, 1), (5, 1)):
        partial_generate(model, ids_of(1, 9), max_new_tokens=tokens, method="topk", budget=0.1)
        assert graphs() == before + made
    again = small_model()  # whose graph is on disk now
    for tokens, made in ((19, 1), (20, 2)):
        partial_generate(again, ids_of(1, 9), max_new_tokens=tokens, method="topk", budget=0.1)
        assert graphs() == before + made


def doubled(module: nn.Module, given: tuple, output: Tensor) -> Tensor:  # noqa: ARG001
    return output * 2


def doubled_input(module: nn.Module, given: tuple) -> tuple:  # noqa: ARG001
    return (given[0] * 2,)


def hook_of_linear_layers(module: nn.Module, given: tuple, output: Tensor) -> Tensor | None:  # noqa: ARG001
    return output * 2 if isinstance(module, nn.Linear) else None


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.inner = nn.Linear(base.in_features, 2, bias=False).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.inner(x).sum(-1, keepdim=True)


def new_forward(model: LlamaForCausalLM) -> None:
    layer = model.model.layers[0].mlp
    before = layer.forward
    layer.forward = lambda x: before(x) * 2


CHANGES = {
    "a hook": lambda model: model.model.layers[0].mlp.register_forward_hook(doubled),
    "a hook before": lambda model: model.lm_head.register_forward_pre_hook(doubled_input),
    "a hook on all modules": lambda _: nn.modules.module.register_module_forward_hook(hook_of_linear_layers),
    "a forward of an instance": new_forward,
    "a module": lambda model: model.set_submodule("model.norm", nn.Identity()),
    "an adapter": lambda model: model.set_submodule("lm_head", LowRank(model.lm_head)),
    "a parameter": lambda model: setattr(model.lm_head, "weight", nn.Parameter(model.lm_head.weight * 2)),
    "an attribute": lambda model: setattr(model.model.norm, "variance_epsilon", 3.0),
    "training": lambda model: model.train() and None,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_compiled_step_is_of_the_model_as_it_is_now(change: str, caplog: pytest.LogCaptureFixture) -> None:
    model = small_model()
    ids = ids_of(1, 20)
    before = answered(model, ids, 4, True, "full")
    handle = CHANGES[change](model)
    try:
        expected = answered(model, ids, 4, False, "full")
        assert (expected.logits[1] - before.logits[1]).abs().max() > 0.1 or change == "training"
        caplog.clear()
        for _ in range(2):  # "auto" makes no graph for four tokens
            assert_same(answered(model, ids, 4, "auto", "full"), expected)
        assert len([line for line in caplog.messages if "changed since its step was compiled" in line]) <= 1
        assert not [line for line in caplog.messages if line.startswith("compiling")]
        assert_same(answered(model, ids, 4, True, "full"), expected)
    finally:
        if handle is not None:
            handle.remove()
    caplog.clear()
    assert_same(answered(model, ids, 4, "auto", "full"), answered(model, ids, 4, False, "full"))


class ChangingStreamer(BaseStreamer):
    """Changes a model after some tokens."""

    def __init__(self, model: LlamaForCausalLM, change: str) -> None:
        self.model = model
        self.change = change
        self.tokens = 0

    def put(self, value: Tensor) -> None:  # noqa: ARG002
        self.tokens += 1
        if self.tokens == 4:
            CHANGES[self.change](self.model)

    def end(self) -> None:
        pass


@pytest.mark.parametrize("compile", [True, "auto"])
@pytest.mark.parametrize("change", ["a hook", "a parameter", "an attribute"])
def test_a_change_while_a_text_is_generated_is_seen(change: str, compile: bool | str) -> None:
    outputs = []
    for how in (compile, False):
        model = small_model()
        ids = ids_of(1, 20)
        answered(model, ids, 4, how is not False, "full")
        loop = partial_decoding("full", compile=how, streamer=ChangingStreamer(model, change))
        outputs.append(
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, output_logits=True,
                return_dict_in_generate=True, custom_generate=loop,
            )
        )  # fmt: skip
    assert_same(*outputs)


def test_what_runs_between_steps_leaves_the_model_or_guards_run() -> None:
    allowed = PrefixConstrainedLogitsProcessor(lambda batch, ids: [3], 1)
    trusted = (TextStreamer(None), StepClock(), MaxLengthCriteria(3), TemperatureLogitsWarper(0.5), None)
    assert compiled.leaves_model(*trusted) and compiled.leaves_model()
    other = ChangingStreamer(small_model(), "training")
    for each in (other, allowed, lambda ids, scores: scores):
        assert not compiled.leaves_model(*trusted, each)
    other.leaves_model = True
    assert compiled.leaves_model(other)


@torch.no_grad()
def test_steps_without_guards_are_the_same_and_end_with_the_mode_of_the_thread() -> None:
    model = small_model()
    texts = [opened(model, compiled.CompiledStep(model, may_compile=True, alone=alone)) for alone in (True, False)]
    step = texts[0].compiled
    token = ids_of(1, 1)
    for _ in range(4):
        assert torch.equal(*(text.step(token) for text in texts))
    again = step._again
    assert again is not None and texts[1].compiled._again is None
    with torch.inference_mode():
        assert torch.equal(*(text.step(token) for text in texts))
    assert step._again is not again
    for _ in range(2):
        assert torch.equal(*(text.step(token) for text in texts))
    handle = model.lm_head.register_forward_hook(doubled)
    changed = [text.step(token) for text in texts]
    handle.remove()
    assert torch.equal(*changed) and not torch.equal(changed[0], texts[0].step(token))


def opened(model: PreTrainedModel, step: compiled.CompiledStep) -> Text:
    text = Text(model, backend_for(model, arm_of("full", None)), compiled=step)
    text.read(ids_of(1, 20))
    return text


@torch.no_grad()
def test_texts_in_several_threads_share_a_graph() -> None:
    model = small_model()
    answered(model, ids_of(1, 20), 4, True, "full")
    before = graphs()
    found: dict[int, list[Tensor]] = {}

    def decode(seed: int) -> None:
        output = answered(model, ids_of(1, 20 + seed, seed=seed), 30, True, "full")
        found[seed] = list(output.logits)

    for seed in range(1, 4):
        decode(seed)
    alone = dict(found)
    threads = [threading.Thread(target=decode, args=(seed,)) for seed in range(1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(1, 4):
        assert all(map(torch.equal, found[seed], alone[seed]))
    assert graphs() == before


def test_numbers_of_texts_are_graphs_of_their_own_below_torchs_limit() -> None:
    model = small_model()
    before = graphs()
    with torch._dynamo.config.patch(recompile_limit=1):
        for batch in (1, 2, 3, 1, 2, 3):
            ids = ids_of(batch, 9)
            assert_same(answered(model, ids, 3, True, "full"), answered(model, ids, 3, False, "full"))
        assert graphs() == before + 3
        model.train()  # which the guards of a graph see: a second one of its key
        with pytest.warns(UserWarning, match="steps of LlamaForCausalLM are not compiled: "):
            ours = answered(model, ids, 3, True, "full")
        assert_same(ours, answered(model, ids, 3, False, "full"))
        answered(model, ids, 3, True, "full")
    assert graphs() == before + 4


def test_graphs_of_a_model_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "MOST_GRAPHS", 2)
    model = small_model()
    for batch, more in ((1, 1), (2, 1), (1, 0), (3, 1), (1, 0), (2, 1)):
        before = graphs()
        answered(model, ids_of(batch, 9), 3, True, "full")
        assert graphs() == before + more, batch


def test_inference_mode_is_a_graph_of_its_own_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = small_model()
    ids = ids_of(1, 9)
    expected = answered(model, ids, 3, True, "full")
    for compile, made in (("auto", 0), (True, 1), ("auto", 0)):
        caplog.clear()
        before = graphs()
        with torch.inference_mode():
            assert_same(answered(model, ids, 3, compile, "full"), expected)
        assert graphs() == before + made
        assert len([line for line in caplog.messages if line.startswith("compiling the decode step")]) == made


def test_what_the_compiler_raises_ends_no_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    false = tmp_path / "false"
    false.write_text("#!/bin/sh\nexit 1\n")
    false.chmod(0o755)
    model = small_model()
    ids = ids_of(5, 9)
    expected = answered(model, ids, 3, False, "full")
    no_compiler = torch._inductor.config.patch({"cpp.cxx": (str(false),)})
    with no_compiler, pytest.warns(UserWarning, match="steps of LlamaForCausalLM are not compiled"):
        assert_same(answered(model, ids, 3, True, "full"), expected, tolerance=0)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "folder"))
    monkeypatch.setattr(compiled, "REPAID_FROM_DISK", 2)
    assert_same(answered(model, ids, 3, "auto", "full"), expected, tolerance=0)
    with pytest.warns(UserWarning, match="steps of LlamaForCausalLM are not compiled"):
        assert_same(answered(model, ids, 3, True, "full"), expected, tolerance=0)


class Remembering(LlamaForCausalLM):
    """Adds the logits of the call before."""

    earlier = torch.zeros(1, 1, 101, dtype=torch.float64)

    def forward(self, *args, **options):  # noqa: ANN002, ANN003, ANN201
        output = super().forward(*args, **options)
        output.logits = output.logits + self.earlier
        self.earlier = output.logits / 2
        return output


def test_a_model_that_remembers_its_last_call_keeps_its_guards() -> None:
    outputs = []
    for how in (True, False):
        model = small_model(Remembering)
        outputs.append(answered(model, ids_of(1, 20), 8, how, "full"))
    assert_same(*outputs)


class Unsure(LlamaForCausalLM):
    """Cannot become one graph: what it does depends on numbers."""

    def forward(self, *args, **options):  # noqa: ANN002, ANN003, ANN201
        output = super().forward(*args, **options)
        if output.logits.sum() > 0:
            output.logits = output.logits.clone()
        return output


def test_a_model_that_cannot_be_compiled_runs_as_it_is_after_a_line() -> None:
    model = small_model(Unsure)
    with pytest.warns(UserWarning, match="steps of Unsure are not compiled: "):
        ours = answered(model, ids_of(1, 20), 10, True, "topk_moments")
    assert_same(ours, answered(model, ids_of(1, 20), 10, False, "topk_moments"), tolerance=0)


def test_a_model_that_computes_with_its_mask_is_read_as_it_is() -> None:
    torch.manual_seed(0)
    config = DogeConfig(
        vocab_size=101, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, bos_token_id=0, eos_token_id=None, pad_token_id=1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = ids_of(1, 30)
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    assert torch.equal(partial_generate(model, ids, max_new_tokens=8, method="topk", budget=1.0), plain)


def test_what_cannot_be_compiled_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    ids = ids_of(1, 9)
    with pytest.raises(ValueError, match="^compile is 'always', not True, False or \"auto\"$"):
        partial_generate(model, ids, max_new_tokens=2, method="topk", budget=0.1, compile="always")
    monkeypatch.setenv("CXX", "a-compiler-that-is-not-there")
    with pytest.raises(ValueError, match="^compile=True is not possible: there is no C\\+\\+ compiler a-compiler"):
        partial_generate(model, ids, max_new_tokens=2, method="topk", budget=0.1, compile=True)
    llama4 = next(family for family in FAMILIES if family.name == "Llama 4").build()
    monkeypatch.delenv("CXX")
    with pytest.raises(ValueError, match="^compile=True is not possible: Llama4ForCausalLM keeps more of a text than"):
        partial_generate(llama4, ids, max_new_tokens=2, method="topk", budget=0.1, compile=True)


def test_other_threads_call_the_model_as_it_is_while_a_compiled_text_is_decoded() -> None:
    model = small_model()
    ids = ids_of(1, 40)
    plain = model(ids).logits.detach()
    wrong = []
    ended = threading.Event()

    def call() -> None:
        while not ended.is_set():
            with torch.no_grad():
                wrong.append(not torch.equal(model(ids).logits, plain))

    thread = threading.Thread(target=call)
    thread.start()
    try:
        ours = answered(model, ids, 30, True, "topk_moments")
    finally:
        ended.set()
        thread.join()
    assert wrong and not any(wrong)
    assert_same(ours, answered(model, ids, 30, False, "topk_moments"))


@pytest.mark.slow
def test_a_second_process_reads_the_graph_from_disk(tmp_path: Path) -> None:
    script = """
import torch
from torch._dynamo.utils import counters
from tests.unit.decode.test_compiled import answered, ids_of, small_model
from residual_mass.decode.compiled import _record
model = small_model()
print(_record(model, 1).is_file(), end=" ")
answered(model, ids_of(1, 20), 5, True, "topk_moments")
print(counters["inductor"]["fxgraph_cache_hit"], counters["stats"]["unique_graphs"], _record(model, 1).is_file())
"""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    printed = []
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        printed.append(run.stdout.split())
    assert printed == [["False", "0", "1", "True"], ["True", "1", "1", "True"]]


@pytest.mark.slow
def test_a_folder_of_graphs_is_shared_by_cpus_of_several_kinds(tmp_path: Path) -> None:
    """Inductor alone finds the loops of the first kind for the second, over vectors of another width."""
    script = """
import torch
from tests.unit.decode.test_compiled import answered, assert_same, ids_of, small_model
model = small_model()
ids = ids_of(2, 20)
assert_same(*(answered(model, ids, 9, compile, "topk_moments") for compile in (True, False)))
"""
    for capability in ("avx2", None, "default"):
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
        environment.pop("ATEN_CPU_CAPABILITY", None)
        if capability is not None:
            environment["ATEN_CPU_CAPABILITY"] = capability
        subprocess.run([sys.executable, "-c", script], env=environment, check=True)


@pytest.mark.slow
@cases(family for family in FAMILIES if family.refusal is None)
def test_every_family_is_one_graph_or_is_refused(family: Family) -> None:
    model = family.build()
    ids = ids_of(1, 40)
    refusal = compiled.compile_refusal(model)
    if refusal is not None:
        with pytest.raises(ValueError, match="^compile=True is"):
            answered(model, ids, 20, True, "topk_moments")
        return
    before = graphs()
    options = {"eos_token_id": None}
    ours = answered(model, ids, 20, True, "topk_moments", **options)
    assert_same(ours, answered(model, ids, 20, False, "topk_moments", **options), tolerance=1e-4)
    assert graphs() == before + 1
