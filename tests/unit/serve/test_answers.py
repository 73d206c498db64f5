"""What stands in for `model.generate` in a served folder, as transformers loads it from there."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.needs import KERNELS, needs
from tests.unit.serve.conftest import flags
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

from residual_mass import PackedCache, partial_decoding
from residual_mass.serve.answers import Answers, answers_of
from residual_mass.serve.command import write_folder

pytestmark = needs(KERNELS)
METHOD = "scan4_regression_64"


class Client(BaseStreamer):
    """A receiver that may leave after some tokens, as the server's does."""

    def __init__(self, leaves_after: int | None = None) -> None:
        self.leaves_after = leaves_after
        self.tokens: list[int] = []

    def put(self, value: Tensor) -> None:
        if self.leaves_after is not None and len(self.tokens) >= self.leaves_after:
            raise RuntimeError("left")
        self.tokens += value.reshape(-1).tolist()

    def end(self) -> None:
        pass


@pytest.fixture
def served(printable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model as `from_pretrained` loads it from the folder that the command writes."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = write_folder(printable, "tiny", flags(tmp_path / "served", str(printable)), 0.2)
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)


def prompt(length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 258, (1, length), generator=generator)


def settings(tokens: int, **more: Any) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=tokens, eos_token_id=1, pad_token_id=1, **more)


def kept(model: Any) -> list[int]:
    return [len(ids) for ids, _ in answers_of(model).kept.entries.values()]


def test_turns_are_those_of_one_cache(served: Any, model: LlamaForCausalLM) -> None:
    first = served.generate(input_ids=prompt(150), generation_config=settings(40))
    second = served.generate(inputs=torch.cat((first, prompt(20, 1)), 1), max_new_tokens=20)
    assert kept(served) == [189, 229]
    cache = PackedCache(model, METHOD)
    options = {"past_key_values": cache, "custom_generate": partial_decoding(METHOD, 0.2)}
    own = model.generate(prompt(150), generation_config=settings(40), **options)
    assert torch.equal(own, first)
    own = model.generate(torch.cat((own, prompt(20, 1)), 1), generation_config=settings(20), **options)
    assert torch.equal(own, second)


def test_a_client_that_leaves(served: Any) -> None:
    """What was read until then is kept, and continues as if it had been asked for so much."""
    whole = served.generate(inputs=prompt(100), generation_config=settings(30))
    answers_of(served).kept.entries.clear()
    with pytest.raises(RuntimeError, match="left"):
        served.generate(inputs=prompt(100), generation_config=settings(30), streamer=Client(leaves_after=105))
    assert kept(served) == [105]
    client = Client()
    again = served.generate(inputs=whole[:, :110], generation_config=settings(20), streamer=client)
    assert client.tokens == again[0].tolist() and kept(served) == [105, 129]


def test_an_error_within_a_step_keeps_nothing(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = served.model.layers[1]
    forward = layer.forward
    calls = []

    def fails(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) > 3:
            raise MemoryError
        return forward(*args, **options)

    monkeypatch.setattr(layer, "forward", fails)
    with pytest.raises(MemoryError):
        served.generate(inputs=prompt(100), generation_config=settings(30))
    assert kept(served) == []


def test_stop_strings(served: Any, printable: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(printable)
    whole = tokenizer.decode(served.generate(inputs=prompt(60), generation_config=settings(40))[0, 60:])
    stop = whole[7:9]
    config = settings(40, stop_strings=[stop])
    stopped = served.generate(inputs=prompt(60), generation_config=config, tokenizer=tokenizer)
    text = tokenizer.decode(stopped[0, 60:])
    assert text == whole[: whole.index(stop) + 2] and len(text) < len(whole)
    assert config.stop_strings == [stop]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_beams": 2}, "beam search"),
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"num_return_sequences": 2, "do_sample": True}, "several texts"),
        ({"prompt_lookup_num_tokens": 3}, "drafts"),
        ({"output_attentions": True}, "attention weights"),
    ],
)
def test_full_attention_answers_the_rest(
    served: Any, model: LlamaForCausalLM, caplog: pytest.LogCaptureFixture, options: dict[str, Any], reason: str
) -> None:
    config = settings(6, **options)
    with caplog.at_level(logging.WARNING):
        torch.manual_seed(0)
        output = served.generate(inputs=prompt(50), generation_config=config)
    assert f"full attention answers: {answers_of(served).refusal(prompt(50), config)}" in caplog.text
    assert reason in caplog.text and kept(served) == []
    torch.manual_seed(0)
    assert torch.equal(output, model.generate(prompt(50), generation_config=config))


def test_several_prompts_are_answered_and_not_kept(served: Any, model: LlamaForCausalLM) -> None:
    ids = torch.cat((prompt(50), prompt(50, 1)))
    output = served.generate(inputs=ids, attention_mask=torch.ones_like(ids), generation_config=settings(6))
    own = partial_decoding(METHOD, 0.2)
    assert torch.equal(output, model.generate(ids, generation_config=settings(6), custom_generate=own))
    assert kept(served) == []


def test_prompts_have_as_many_tokens_as_the_model_has_positions_for(served: Any) -> None:
    config = settings(500)
    output = served.generate(inputs=prompt(2040), generation_config=config)
    assert output.shape[1] == 2048 and config.max_new_tokens == 8
    with pytest.raises(ValueError, match=r"the prompt has 2,048 tokens, and tiny was made for texts of 2,048"):
        served.generate(inputs=prompt(2048), generation_config=settings(5))
    with pytest.raises(ValueError, match="the prompt is empty"):
        served.generate(inputs=prompt(0), generation_config=settings(5))


def test_weights_are_packed_at_the_first_request(printable: Path, tmp_path: Path, model: LlamaForCausalLM) -> None:
    folder = write_folder(printable, "tiny", flags(tmp_path, str(printable), "--weights", "8"), 0.2)
    packed = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    own: Answers = answers_of(packed)
    assert own.settings.weights == 8 and "8 bits" in packed.packed_weights
    assert answers_of(packed) is own


def edited(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def tuned(folder: Path) -> None:
    """Other weights in a file of the same size and time."""
    path = folder / "model.safetensors"
    status = path.stat()
    tensors = load_file(path)
    tensors["model.layers.1.self_attn.k_proj.weight"] *= 1.5
    save_file(tensors, path, {"format": "pt"})
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size and path.stat().st_mtime_ns == status.st_mtime_ns


def touched(folder: Path) -> None:
    for path in folder.iterdir():
        os.utime(path, (1, 1))


ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512}
CHANGES: list[tuple[bool, Callable[[Path], None], list[str]]] = [
    (True, lambda folder: None, []),
    (True, touched, []),
    (False, lambda folder: edited(folder, rope_parameters=ROPE), []),
    (False, lambda folder: edited(folder, rope_parameters={"rope_type": "default", "rope_theta": 500.0}), []),
    (False, lambda folder: edited(folder, rms_norm_eps=0.1), []),
    (False, tuned, []),
    (False, lambda folder: None, ["--weights", "8"]),
    (False, lambda folder: None, ["--budget", "30"]),
    (False, lambda folder: None, ["--method", "scan4"]),
]


@pytest.mark.parametrize(("same", "change", "more"), CHANGES)
def test_kept_files_are_of_the_model_that_is_served(
    same: bool, change: Callable[[Path], None], more: list[str], printable: Path, tmp_path: Path
) -> None:
    """After any change an answer is that of a server without kept files."""

    def started(*words: str) -> Any:
        options = flags(tmp_path / "served", str(source), *words)
        folder = write_folder(source, "tiny", options, float(options.budget) / 100)
        return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)

    def answered(model: Any, ids: Tensor) -> Tensor:
        return answers_of(model).generate(model, ids, generation_config=settings(20))

    source = Path(shutil.copytree(printable, tmp_path / "source"))
    keep = ["--keep", str(tmp_path / "kept")]
    first = started(*keep)
    ids = torch.cat((answered(first, prompt(150)), prompt(20, 1)), 1)
    answers_of(first).kept.save()
    held = list((tmp_path / "kept").rglob("*.safetensors"))
    assert len(held) == 1
    change(source)
    again = started(*keep, *more)
    found = answers_of(again).kept.take(ids[0]).get_seq_length()
    assert found == (169 if same else 0)
    if not same:
        assert torch.equal(answered(again, ids), answered(started(*more), ids))


def test_a_method_without_kernels_here_is_refused_at_once(
    printable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(printable, "tiny", flags(tmp_path, str(printable), "--method", "topk"), 0.2)
    loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    with pytest.raises(ValueError, match=r"cannot be served with topk: the CPU kernels serve"):
        answers_of(loaded)
