"""The model `partial_kv` of lm-eval against lm-eval's own model, on tiny tasks with their own data."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import yaml
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tests.conftest import byte_tokenizer, tiny_llama
from tests.unit.decode.reference import masked_logits
from tests.unit.model.families import FAMILIES
from tests.unit.model.gguf_files import write_gguf
from tests.unit.model.test_decoding import random_maps
from transformers import PreTrainedModel

from residual_mass import load_gguf
from residual_mass.core.selection import retrieved_count
from residual_mass.decode.text import Text
from residual_mass.lm_eval import BadArgument, PartialKV
from residual_mass.lm_eval import __main__ as command_line
from residual_mass.lm_eval.__main__ import main
from residual_mass.model.loading import Backbone
from residual_mass.model.packed_weights import pack_weights
from residual_mass.spec.settings import AnchorSpec

GENERATION = {
    "lines": {"until": ["\n"], "max_gen_toks": 12},
}
TASKS = (*GENERATION, "choice", "rolling")
TEXTS = (
    9 * "The quick brown fox jumps over it. ", "Short", 40 * "xyz, ", 11 * "Rain in May? ", 6 * "One\nTwo ",
)  # fmt: skip
DOCUMENTS = [
    {"text": text, "choices": ["yes", "no", "nobody", "A", "B"], "answer": index} for index, text in enumerate(TEXTS)
]


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No request leaves the machine, and what `datasets` keeps goes with the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        yield


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a YAML file for each of TASKS."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    common = {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test",
        "doc_to_text": "{{text}}", "doc_to_target": "{{choices[answer]}}",
    }  # fmt: skip
    kinds: dict[str, dict[str, Any]] = {
        name: {
            "output_type": "generate_until",
            "generation_kwargs": arguments,
            "metric_list": [{"metric": "exact_match"}],
        }
        for name, arguments in GENERATION.items()
    }
    kinds["choice"] = {"output_type": "multiple_choice", "doc_to_target": "{{answer}}", "doc_to_choice": "{{choices}}"}
    metrics = [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")]
    kinds["rolling"] = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "metric_list": metrics}
    kinds["rolling"]["doc_to_target"] = "{{text}}"
    for name, kind in kinds.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **common, **kind}))
    return folder


def options_of(backbone: Backbone, **others: Any) -> dict[str, Any]:
    """A length that cuts the longest document, and windows in it."""
    return {"pretrained": backbone.model, "tokenizer": backbone.tokenizer, "max_length": 200, **others}


def responses(results: dict[str, Any], task: str) -> list[Any]:
    """Of every document, in order; generated texts, or log-likelihoods with what goes with them."""
    return [sample["resps"] for sample in sorted(results["samples"][task], key=lambda sample: sample["doc_id"])]


def assert_same(ours: dict[str, Any], theirs: dict[str, Any], task: str) -> None:
    for one, other in zip(responses(ours, task), responses(theirs, task), strict=True):
        if task in GENERATION:
            assert one == other
        elif task == "rolling":
            assert one[0][0] == pytest.approx(other[0][0], abs=1e-2)  # of 200 and more tokens
        else:
            assert [greedy for ((_, greedy),) in one] == [greedy for ((_, greedy),) in other]
            assert [value for ((value, _),) in one] == pytest.approx([value for ((value, _),) in other], abs=1e-3)
    for name, score in theirs["results"][task].items():
        if isinstance(score, float):
            assert ours["results"][task][name] == pytest.approx(score, rel=1e-3, nan_ok=True), name


Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def results(tasks: Path, tiny_backbone: Backbone) -> Results:
    """Of lm-eval's own model, of full attention, and of TopK of everything."""
    manager, options = TaskManager(include_path=str(tasks), include_defaults=False), options_of(tiny_backbone)
    models = {
        "hflm": HFLM(**options, batch_size=3),
        "full": PartialKV(**options, batch_size=3, method="full", stride=16),
        "whole": PartialKV(**options, batch_size=3, method="topk", budget=1.0, stride=16),
    }
    return {
        name: simple_evaluate(model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0)
        for name, model in models.items()
    }


@pytest.mark.parametrize("task", TASKS)
def test_full_is_lm_evals_own_model_and_topk_of_everything_is_full(task: str, results: Results) -> None:
    assert_same(results["full"], results["hflm"], task)
    assert_same(results["whole"], results["full"], task)


def test_the_results_name_the_method(results: Results) -> None:
    assert results["whole"]["config"]["partial_kv"] == {
        "method": "topk", "budget": 1.0, "phi_sha256": None, "num_sink": 4, "num_tail": 16, "stride": 16,
        "weights": None,
    }  # fmt: skip
    assert "partial_kv" not in results["hflm"]["config"]


def instances(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


def masked_log_probs(
    backbone: Backbone, tokens: list[int], prefix: int, budget: float, anchors: AnchorSpec
) -> torch.Tensor:
    """[T] of the tokens after the first one behind the prefix: top-K by a mask over one pass of the plain model."""
    k = retrieved_count(budget * 100, prefix, anchors.sink + anchors.tail)
    logits = masked_logits(backbone.model, tokens[:-1], prefix, k, anchors)[prefix:]
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens[prefix + 1 :]).unsqueeze(-1)).squeeze(-1)


def test_a_likelihood_under_topk_is_that_of_a_mask(tiny_backbone: Backbone) -> None:
    model = PartialKV(**options_of(tiny_backbone, method="topk", budget=0.25, num_sink=2, num_tail=9))
    context, answers = DOCUMENTS[3]["text"], (" yes", " it never does")
    found = model.loglikelihood(instances("loglikelihood", *((context, answer) for answer in answers)))
    for answer, (value, _) in zip(answers, found, strict=True):
        tokens = tiny_backbone.tokenizer(context + answer, add_special_tokens=False).input_ids
        start = len(tiny_backbone.tokenizer(context.rstrip(), add_special_tokens=False).input_ids) - 1
        slow = masked_log_probs(tiny_backbone, tokens, start, 0.25, AnchorSpec(2, 9))
        assert value == pytest.approx(float(slow.sum()), abs=1e-3)


def test_a_rolling_likelihood_under_topk_is_that_of_a_mask_chunk_by_chunk(tiny_backbone: Backbone) -> None:
    model = PartialKV(**options_of(tiny_backbone, method="topk", budget=0.25, num_sink=2, num_tail=9, stride=40))
    text = DOCUMENTS[3]["text"]
    (found,) = model.loglikelihood_rolling(instances("loglikelihood_rolling", (text,)))
    tokens = [model.prefix_token_id, *tiny_backbone.tokenizer(text, add_special_tokens=False).input_ids]
    with torch.no_grad():
        first = tiny_backbone.model(torch.tensor([tokens[:40]])).logits[0].log_softmax(-1)
    slow = float(first.gather(-1, torch.tensor(tokens[1:41]).unsqueeze(-1)).sum())
    for start in range(40, len(tokens) - 1, 40):
        slow += float(masked_log_probs(tiny_backbone, tokens[: start + 41], start, 0.25, AnchorSpec(2, 9)).sum())
    assert found == pytest.approx(slow, abs=1e-2)


def test_choices_share_one_reading_of_their_context(tiny_backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    model, read, forward = PartialKV(**options_of(tiny_backbone)), [], Text.read
    monkeypatch.setattr(Text, "read", lambda text, ids: read.append(ids.shape[1]) or forward(text, ids))
    pairs = [(text, choice) for text in ("a" * 50, "b" * 60) for choice in ("A", "B", "yes", "yet")]
    answers = model.loglikelihood(instances("loglikelihood", *pairs))
    assert read == [59, 49]
    assert len({value for value, _ in answers}) == len(pairs)
    del read[:]
    model.loglikelihood_rolling(instances("loglikelihood_rolling", ("c" * 150,)))
    assert read == []  # shorter than a chunk
    model.stride = 40
    model.loglikelihood_rolling(instances("loglikelihood_rolling", ("c" * 150,)))
    assert read == [40, 40, 40]


ASKED = {
    "generate_until": [(DOCUMENTS[0]["text"], {"until": [], "max_gen_toks": 8}), ("Short", {"max_gen_toks": 8})],
    "loglikelihood": [(DOCUMENTS[0]["text"], answer) for answer in (" yes", " no")],
    "loglikelihood_rolling": [(DOCUMENTS[0]["text"],)],
}


def family(name: str) -> PreTrainedModel:
    """A tiny random model, one layer of which reads the whole text."""
    return next(each for each in FAMILIES if each.name == name).build(vocab_size=258)


def values(model: HFLM, kind: str) -> list[Any]:
    """Of ASKED; generated texts, or log-likelihoods alone."""
    answers = getattr(model, kind)(instances(kind, *ASKED[kind]))
    return [answer[0] for answer in answers] if kind == "loglikelihood" else answers


def test_layers_with_a_window(tiny_backbone: Backbone) -> None:
    options = options_of(tiny_backbone, pretrained=family("Gemma 3"), batch_size=2)
    for kind in ASKED:
        theirs = values(HFLM(**options), kind)
        close = theirs if kind == "generate_until" else pytest.approx(theirs, rel=1e-5)
        assert values(PartialKV(**options, method="full", stride=16), kind) == close
        assert values(PartialKV(**options, method="topk", budget=1.0, stride=16), kind) == close
        if kind != "generate_until":
            assert values(PartialKV(**options, budget=0.2, stride=16), kind) != pytest.approx(theirs, rel=1e-5)


def test_a_model_with_states(tiny_backbone: Backbone) -> None:
    options = options_of(tiny_backbone, pretrained=family("Qwen 3 Next"), batch_size=2)
    for kind in ASKED:
        theirs = values(HFLM(**options), kind)
        close = theirs if kind == "generate_until" else pytest.approx(theirs, rel=1e-4)
        assert values(PartialKV(**options, method="full", stride=16), kind) == close
        assert values(PartialKV(**options, budget=0.2, stride=16), kind) != close


def test_beams_are_refused_in_one_line(tiny_backbone: Backbone) -> None:
    asked = instances("generate_until", ("Short", {"max_gen_toks": 8, "num_beams": 2, "do_sample": False}))
    with pytest.raises(BadArgument, match="^a partial step does not support beam search: [^\n]*num_beams=1$"):
        PartialKV(**options_of(tiny_backbone, method="full")).generate_until(asked)


def test_maps_from_a_file(tiny_backbone: Backbone, tmp_path: Path) -> None:
    random_maps(tiny_backbone).save(tmp_path / "phi.safetensors")
    options = {"method": "topk_phi", "budget": "0.2", "phi": str(tmp_path / "phi.safetensors")}
    model = PartialKV(**options_of(tiny_backbone, **options))
    plain = PartialKV(**options_of(tiny_backbone, method="topk", budget=0.2))
    asked = instances("loglikelihood", (DOCUMENTS[0]["text"], " yes"))
    assert model.loglikelihood(asked) != plain.loglikelihood(asked)
    asked = instances("generate_until", (DOCUMENTS[0]["text"], {"until": [], "max_gen_toks": 20}))
    assert model.generate_until(asked) != plain.generate_until(asked)
    assert model.get_model_info()["partial_kv"]["phi_sha256"] == model.phi.sha256


def test_a_gguf_file(tmp_path: Path) -> None:
    """It scores what the packed model scores, and knows its tokenizer."""
    file = tmp_path / "tiny.gguf"
    write_gguf(file, tiny_llama(), lambda name: "Q8_0" if "embed" in name else "Q4_0")
    named = PartialKV(str(file), method="topk", budget=0.5)
    model, tokenizer = load_gguf(file, torch.float32)
    loaded = PartialKV(model, tokenizer=tokenizer, method="topk", budget=0.5)
    asked = instances("loglikelihood", (TEXTS[0], "yes"), (TEXTS[2], "no"))
    assert named.loglikelihood(asked) == loaded.loglikelihood(asked)
    assert "codes kept" in named.model.packed_weights
    with pytest.raises(BadArgument, match="nothing.gguf: no such file"):
        PartialKV(str(tmp_path / "nothing.gguf"), method="cache8")


def test_what_is_given_beside_a_gguf_file_counts(tmp_path: Path) -> None:
    """Its tokenizer and its dtype are the defaults alone."""
    file = tmp_path / "tiny.gguf"
    write_gguf(file, tiny_llama(), lambda name: "Q8_0", has_tokenizer=False)
    given = byte_tokenizer()
    given.save_pretrained(tmp_path / "bytes")
    for tokenizer in (given, str(tmp_path / "bytes")):
        model = PartialKV(str(file), method="full", tokenizer=tokenizer, dtype="bfloat16", device="cpu")
        assert model.tok_encode("ab") == given("ab").input_ids and model.model.dtype == torch.bfloat16
        assert model.loglikelihood(instances("loglikelihood", (TEXTS[0], "yes")))[0][0] < 0
    with pytest.raises(BadArgument, match="the file has no tokenizer; name one"):
        PartialKV(str(file), method="full")


@pytest.mark.parametrize(
    "options, said",
    [
        ({"offload_folder": "here", "load_in_8bit": True}, "offload_folder, load_in_8bit would be ignored beside a GG"),
        ({"revision": "v2"}, "revision would be ignored beside a GGUF file: leave revision out"),
        ({"device": "cuda:0"}, "a GGUF file runs on a CPU, not on cuda:0: leave device out"),
        ({"dtype": "int8"}, "dtype is 'int8': write float32, bfloat16, float16 or float64"),
        ({"dtype": "Tensor"}, "dtype is 'Tensor': write"),
    ],
)
def test_what_would_be_ignored_beside_a_gguf_file_is_refused(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(BadArgument, match=said):
        PartialKV(str(tmp_path / "any.gguf"), method="full", **options)


def test_packed_weights(tiny_backbone: Backbone) -> None:
    packed = pack_weights(copy.deepcopy(tiny_backbone.model), 8)
    likelihoods = {}
    for name, model, weights in (
        ("plain", tiny_backbone.model, None),
        ("packed before", packed, None),
        ("packed here", copy.deepcopy(tiny_backbone.model), 8),
    ):
        options = options_of(tiny_backbone, method="topk", budget=0.25, num_sink=2, num_tail=9, weights=weights)
        own = PartialKV(**options | {"pretrained": model})
        likelihoods[name] = own.loglikelihood(instances("loglikelihood", (TEXTS[0], "yes"), (TEXTS[2], "no")))
        assert own.get_model_info()["partial_kv"]["weights"] == weights
    assert likelihoods["packed here"] == likelihoods["packed before"]
    assert likelihoods["packed here"] != likelihoods["plain"]


WRONG = [
    ({"method": "topq"}, "method 'topq' is unknown; the most similar are topk, "),
    ({"budget": 2}, r"budget=2 is not a share of the prompt's tokens in \(0, 1\]: for 2 % write 0.02"),
    ({"budget": "nan"}, "budget='nan' is not a share"),
    ({"budget": 1}, "budget=1 may mean 1 % or the whole prompt: write 0.01 or 1.0"),
    ({"method": "topk_phi"}, "method topk_phi needs phi maps"),
    ({"method": "topk_phi", "phi": "missing.safetensors"}, "missing.safetensors: no such file"),
    ({"num_sink": -1}, "num_sink is -1, not a whole number of at least 0"),
    ({"num_tail": 1.5}, "num_tail is 1.5, not a whole number"),
    ({"stride": 0}, "stride is 0, not a whole number of at least 1"),
    ({"weights": 5}, "bits is 5, not 4 or 8"),
    ({"parallelize": True}, "does not support parallelize: leave parallelize out"),
    ({"peft": "adapter", "autogptq": True}, "does not support peft, autogptq: leave peft out"),
    ({"backend": "seq2seq"}, "LlamaForCausalLM is not a decoder-only model"),
]


@pytest.mark.parametrize(("arguments", "said"), WRONG)
def test_wrong_arguments_are_one_line(arguments: dict[str, Any], said: str, tiny_backbone: Backbone) -> None:
    with pytest.raises(BadArgument, match=said) as error:
        PartialKV(**options_of(tiny_backbone, **arguments))
    assert "\n" not in str(error.value)


def test_a_wrong_argument_on_the_command_line_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command_line, "cli_evaluate", lambda: PartialKV("any", budget=20))
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert said == "partial_kv: error: budget=20 is not a share of the prompt's tokens in (0, 1]: for 20 % write 0.2\n"


@pytest.mark.filterwarnings("error:method")
@pytest.mark.parametrize("method", ["full", "cache8"])
def test_the_default_budget_is_not_for_methods_that_choose_no_tokens(tiny_backbone: Backbone, method: str) -> None:
    assert PartialKV(**options_of(tiny_backbone, method=method)).get_model_info()["partial_kv"]["budget"] is None
