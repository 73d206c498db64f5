"""`residual-mass measure` on a tiny model with random weights and byte tokens."""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import byte_tokenizer, save_tiny, tiny_llama
from tests.unit.backbones.families import FAMILIES

from residual_mass import cli
from residual_mass.backbones.loading import Backbone, load_backbone
from residual_mass.backbones.phi_maps import PhiMaps
from residual_mass.benchmarks import fidelity, force
from residual_mass.core.settings import AnchorSpec, MapSpec
from residual_mass.diagnostics.packs import visit_layers
from residual_mass.files import read_csv, read_json
from residual_mass.measure import answer, command, models, page
from residual_mass.measure.command import Asked
from residual_mass.measure.distances import Line, Measured, measure
from residual_mass.measure.steps import Reading, readings
from residual_mass.measure.texts import Text, read, windows
from residual_mass.methods.arms import ArmSpec
from residual_mass.study.specs import BackboneSpec, FidelitySpec, ForceSpec

METHODS = ("topk", "topk_moments", "scan4_regression")
ARMS = (ArmSpec("full"), *(ArmSpec(method, budget) for method in METHODS for budget in (10.0, 20.0)))


def words(seed: int, count: int) -> str:
    """A text of so many characters and tokens."""
    rng = random.Random(seed)
    return " ".join("".join(rng.choices("abcdefgh", k=rng.randint(2, 7))) for _ in range(count))[:count]


def parsed(*arguments: str) -> Asked:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.asked_of(parser.parse_args(arguments))


@pytest.fixture(scope="session")
def model(benchmark_assets: Path) -> str:
    return str(benchmark_assets / "models" / "tiny-llama")


@pytest.fixture
def asked(model: str, benchmark_assets: Path, tmp_path: Path) -> Asked:
    """Two texts: a folder of a long file and short ones, and a corpus of the assets."""
    folder = tmp_path / "notes"
    (folder / "deep").mkdir(parents=True)
    (folder / "long.txt").write_text(words(0, 3000))
    for number in range(4):
        (folder / "deep" / f"{number}.txt").write_text(words(number + 1, 200))
    return parsed(
        model, str(folder), "books", "--length", "256", "--documents", "3", "--tokens", "5", "--budgets", "10", "20",
        "--methods", *METHODS, "--device", "cpu", "--assets", str(benchmark_assets), "--out", str(tmp_path / "out"),
    )  # fmt: skip


def test_the_numbers_are_those_of_a_study(
    asked: Asked, backbone_spec: BackboneSpec, benchmark_assets: Path, tmp_path: Path
) -> None:
    """The stages `force` and `fidelity` on the same corpus, to the digit."""
    measure(asked)
    spec = ForceSpec(
        study="test", backbone=backbone_spec, length="256", corpora=("books",), documents=3, tokens=5, seed=0, asked=(),
        arms=ARMS, arms_of_documents=(), anchors=AnchorSpec(), truncate_to="1k", maps=(), recipe=1,
    )  # fmt: skip
    forced, out = tmp_path / "forced.parquet", tmp_path / "fidelity.csv"
    force.run(spec, benchmark_assets, [], [], tmp_path / "store.jsonl", forced)
    of_study = FidelitySpec(
        study="test", backbone=backbone_spec, length="256", recipe=1, bootstrap_resamples=1000, seed=0
    )
    fidelity.run(of_study, forced, out, tmp_path / "pairs.csv")

    def numbers(file: Path) -> list[list[str]]:
        rows = [row for row in read_csv(file, ["text"], "test") if (row["text"], row["state"]) == ("books", "own")]
        return [
            [row[name] for name in ("method", "budget_percent", "metric", "value", "ci_low", "ci_high")] for row in rows
        ]

    assert len(numbers(out)) > 50
    assert numbers(asked.out / "data" / "fidelity.csv") == numbers(out)


def test_an_interrupted_run_goes_on_and_ends_alike(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = replace(asked, out=asked.out.with_name("undisturbed"))
    page.write(measure(undisturbed), undisturbed.out)
    append, calls = force.RowStore.append, []

    def append_twice(store: force.RowStore, rows: list[force.Row]) -> None:
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(len(rows))
        append(store, rows)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(force.RowStore, "append", append_twice)
        measure(asked)
    page.write(measure(asked), asked.out)
    facts = read_json(asked.out / "data" / "forced.parquet.meta.json")
    assert facts["rows"] - facts["rows_computed"] == sum(calls) > 0
    for name in ("measured.csv", "measured.png", "measured.html"):
        assert (asked.out / name).read_bytes() == (undisturbed.out / name).read_bytes()


def test_the_files_hold_what_was_measured(asked: Asked) -> None:
    found = measure(replace(asked, target_kl=100.0))
    paths = page.write(found, asked.out)
    with open(paths[0], newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert {(row["text"], row["method"], row["budget_percent"]) for row in rows} == {
        (text.name, method, budget) for text in found.texts for method in METHODS for budget in ("10", "20")
    }
    best = answer.recommended(found)
    assert best is not None
    assert {(row["method"], float(row["budget_percent"])) for row in rows if row["recommended"] == "1"} == {
        (best.method, best.budget_percent)
    }
    html = paths[2].read_text()
    assert best.code in html.replace("&#34;", '"') and "data:image/png;base64," in html
    assert not re.search(r'(?:src|href)="(?!data:)', html), "the page loads nothing"
    for row in rows:
        assert f"{float(row['value']):.2g}" in html
    assert best.code in answer.printed(found)


def test_bytes_are_those_of_the_tokens_that_are_read(backbone_spec: BackboneSpec, benchmark_assets: Path) -> None:
    """TopK's tokens, found again by sorting each head's scores in float64."""
    backbone: Backbone = load_backbone(backbone_spec, benchmark_assets, torch.device("cpu"))
    generator = torch.Generator().manual_seed(5)
    sequence = torch.randint(2, 258, (200,), generator=generator).tolist()
    length, anchors, budget = 128, AnchorSpec(2, 3), 12.5
    found = readings(backbone, [sequence], length, ["topk"], [budget], anchors, None)["topk", budget]
    k, d, read = 16 - 5, backbone.shape.head_dim, []

    def visit(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> None:
        group = queries.shape[0] // keys.shape[0]
        for head, of_head in enumerate(keys.double()):
            for query in range(queries.shape[1]):
                rows = queries[head * group : (head + 1) * group, query].double() @ of_head.T
                tokens = {int(t) + 2 for row in rows for t in row[2 : length - 3].argsort(descending=True)[:k]}
                read.append(len(tokens) + 5)

    visit_layers(backbone, sequence[: length + 8], length, visit)
    tokens_read = sum(read) / len(read)
    assert found.share == pytest.approx((2 * d * length + 2 * d * tokens_read) / (4 * d * length), rel=1e-6)
    assert found.recall == pytest.approx(1)


@given(st.lists(st.integers(20, 400), min_size=1, max_size=6), st.integers(1, 20), st.integers(1, 12))
def test_windows_share_no_token_and_fill_what_there_is(lengths: list[int], size: int, count: int) -> None:
    runs, first = [], 0
    for length in lengths:
        runs.append(list(range(first, first + length)))
        first += length
    found = windows(runs, size, count)
    tokens = [token for window in found for token in window]
    assert len(set(tokens)) == len(tokens) and all(len(window) == size for window in found)
    assert all(window == list(range(window[0], window[0] + size)) for window in found), "in order, of one run"
    room = sum(length // size for length in lengths)
    assert len(found) == min(count, room) or len(lengths) > count
    assert len(found) <= count


def test_short_files_are_joined_and_long_ones_cut(asked: Asked, benchmark_assets: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    notes, books = sorted(read(asked, tokenizer, 262), key=lambda text: text.name == "books")
    assert [len(sequence) for sequence in notes.sequences] == [262] * 3 and len(books.sequences) == 3
    texts = [tokenizer.decode(sequence) for sequence in notes.sequences]
    assert any(words(1, 200)[:50] in text and words(2, 200)[:50] in text for text in texts), "two short files together"
    long = words(0, 3000)
    assert sum(text.strip() in long for text in texts) >= 1


def line(method: str, share: float, high: float | None, text: str = "a", budget: float = 2.0) -> Line:
    return Line(
        text, method, budget, 0.5 if high is None else high / 2, high and high / 4, high, 0.9, Reading(share, 1.0)
    )


def measured(lines: list[Line], documents: int = 8, copied: float = 0.5) -> Measured:
    texts = [Text(name, [[0]] * documents, documents) for name in dict.fromkeys(each.text for each in lines)]
    spec = BackboneSpec("measure", "m/m", "r", "hub", "float32", "m", 2048, False, name="m")
    return Measured(
        parsed("m", "--target-kl", "0.01"), spec, texts, lines, dict.fromkeys("ab", copied), {"a": 0.1, "b": 0.1}
    )


def test_the_cheapest_that_meets_the_target_on_every_text_is_recommended() -> None:
    lines = [
        line("topk", 0.2, 0.005), line("topk", 0.2, 0.02, "b"), line("topk_moments", 0.3, 0.01),
        line("topk_moments", 0.5, 0.009, "b"), line("scan4", 0.5, 0.001), line("scan4", 0.6, 0.001, "b"),
    ]  # fmt: skip
    best = answer.recommended(measured(lines))
    assert best is not None and (best.method, best.share, best.high) == ("topk_moments", pytest.approx(0.4), 0.01)
    assert "40 %" in answer.verdict(measured(lines)) and "every text" in answer.verdict(measured(lines))


def test_where_none_meets_the_target_the_nearest_is_named() -> None:
    lines = [line("topk", 0.2, 0.5), line("topk_moments", 0.3, 0.02)]
    assert answer.recommended(measured(lines)) is None
    assert "None of the methods" in answer.verdict(measured(lines)) and "topk_moments" in answer.verdict(
        measured(lines)
    )


def test_a_single_document_recommends_nothing() -> None:
    lines = [line("topk", 0.2, None)]
    assert answer.recommended(measured(lines, 1)) is None
    assert "single document" in answer.verdict(measured(lines, 1))
    assert "nats" in answer.printed(measured(lines, 1))


def test_what_cannot_be_told_is_said() -> None:
    lines = [line("topk", 0.2, 0.005)]
    assert not any("hardly tests" in each or "rough" in each for each in answer.limits(measured(lines)))
    assert any("hardly tests" in each for each in answer.limits(measured(lines, copied=0.01)))
    assert any("rough" in each for each in answer.limits(measured(lines, 3)))
    alike = replace(measured(lines), texts=[Text("a", [[0]] * 8, 2)])
    assert any("2 files" in each for each in answer.limits(alike))


WRONG = {
    "no such model": (["{tmp}/none", "{text}"], "none: cannot be fetched|none: not on the hub"),
    "a folder without a model": (["{tmp}", "{text}"], r"no config\.json"),
    "a model of pickles": (["{tmp}/pickle", "{text}"], r"no \*\.safetensors"),
    "no such text": (["{model}", "{tmp}/none.txt"], "none.txt: no such file"),
    "a binary text": (["{model}", "{tmp}/binary"], "binary: not a text"),
    "a text with zeros": (["{model}", "{tmp}/zeros"], "zeros: holds bytes that no text has"),
    "a short text": (
        ["{model}", "{tmp}/short.txt"],
        r"text files: \d+ tokens, and .* 545 .*--length 512",
    ),
    "an unknown method": (["{model}", "{text}", "--methods", "best"], "method 'best' is unknown"),
    "a method that needs maps": (["{model}", "{text}", "--methods", "topk_phi"], "topk_phi needs feature maps.*--phi"),
    "full attention": (["{model}", "{text}", "--methods", "full"], "--methods: full is what"),
    "a budget out of range": (["{model}", "{text}", "--budgets", "200"], "budget_percent 200 is outside"),
    "a length that is none": (["{model}", "{text}", "--length", "long"], "length 'long' is not a length label"),
    "a length beyond the model": (["{model}", "{text}", "--length", "64k"], "65,569 tokens, and .* was made for"),
    "no documents": (["{model}", "{text}", "--documents", "0"], "--documents is 0, not 1 or more"),
    "a target of zero": (["{model}", "{text}", "--target-kl", "0"], "--target-kl is 0"),
    "an absent GPU": (["{model}", "{text}", "--device", "cuda:7"], "--device cuda:7: torch cannot use it here"),
    "an unknown device": (["{model}", "{text}", "--device", "abacus"], "--device abacus: torch cannot use it"),
    "maps of another model": (["{model}", "{text}", "--methods", "topk_phi", "--phi", "{tmp}/text.txt"], "text.txt"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_is_told_in_one_line(
    case: str, model: str, benchmark_assets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "text.txt").write_text(words(9, 5000))
    (tmp_path / "short.txt").write_text("ten letters")
    (tmp_path / "binary").write_bytes(bytes(range(128, 256)) * 9)
    (tmp_path / "zeros").write_bytes(b"\0" * 5000)
    (tmp_path / "pickle").mkdir()
    (tmp_path / "pickle" / "config.json").write_text('{"model_type": "llama"}')
    arguments, message = WRONG[case]
    given = [each.format(tmp=tmp_path, model=model, text=tmp_path / "text.txt") for each in arguments]
    with pytest.raises(SystemExit) as stopped:
        cli.main(
            ["measure", *given[:2], "--length", "512", "--out", str(tmp_path / "out"), "--assets",
             str(benchmark_assets), *given[2:]]
        )  # fmt: skip
    errors = [each for each in capsys.readouterr().err.splitlines() if "error:" in each]
    assert stopped.value.code == 2 and len(errors) == 1
    assert re.search(message, errors[0]), errors[0]
    assert not list((tmp_path / "out").glob("measured.*"))


def test_a_model_of_another_shape_from_a_folder(tmp_path: Path) -> None:
    """As a user types it; one query head a KV head, so a step reads fewer distinct tokens."""
    save_tiny(tiny_llama(3, layers=2, heads=2, kv_heads=2), tmp_path / "assets")
    (tmp_path / "a.txt").write_text(words(1, 4000))
    folder = str(tmp_path / "assets" / "models" / "tiny-llama")
    arguments = f"measure {folder} a.txt --length 256 --tokens 4 --documents 3 --methods topk scan4_moments --out found"
    run = subprocess.run(
        [sys.executable, "-m", "residual_mass", *arguments.split()], cwd=tmp_path, capture_output=True, text=True,
        check=True, env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert "files, 3 documents" in run.stdout and "What this cannot tell" in run.stdout
    assert (tmp_path / "found" / "measured.html").stat().st_size > 20_000
    settings = re.search(r"<pre>(\{.*?\})</pre>", (tmp_path / "found" / "measured.html").read_text(), re.DOTALL)
    assert settings and json.loads(settings[1].replace("&#34;", '"'))["documents"] == 3


@pytest.mark.parametrize("family", ["Gemma 3", "gpt-oss"])
def test_layers_with_a_window_stay_exact(family: str, tmp_path: Path) -> None:
    """Bytes are those of the other layers; with all of the prompt read exactly nothing changes."""
    folder = tmp_path / "model"
    next(each for each in FAMILIES if each.name == family).build(vocab_size=258).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    (tmp_path / "a.txt").write_text(words(2, 2000))
    asked = parsed(
        str(folder), str(tmp_path / "a.txt"), "--length", "128", "--tokens", "6", "--documents", "3",
        "--budgets", "25", "100", "--methods", "topk", "topk_moments", "--device", "cpu",
        "--out", str(tmp_path / "out"),
    )  # fmt: skip
    found = {(each.method, each.budget_percent): each for each in measure(asked).lines}
    assert found["topk", 25].kl > 1e-6 and found["topk", 25].reading.share < 1
    for method in ("topk", "topk_moments"):
        assert found[method, 100].kl == pytest.approx(0, abs=1e-6) and found[method, 100].same_top == 1


def test_feature_maps_take_part(
    asked: Asked, backbone_spec: BackboneSpec, benchmark_assets: Path, tmp_path: Path
) -> None:
    """Maps of this model; those of another one are refused."""
    shape = load_backbone(backbone_spec, benchmark_assets, torch.device("cpu")).shape
    file = tmp_path / "own.safetensors"
    asked = replace(asked, methods=("topk", "topk_phi"), phi=file, texts=("books",))
    own = models.named(asked)
    for revision in ("another", own.revision):
        facts = {"model_id": own.model_id, "revision": revision, "length": 256}
        PhiMaps(shape, MapSpec(d_emb=8, d_phi=4), facts).save(file)
        if revision == "another":
            with pytest.raises(ValueError, match="trained on .*another"):
                measure(asked)
    found = measure(asked)
    by_method = {each.method: each.reading.share for each in found.lines if each.budget_percent == 10}
    assert by_method["topk"] < by_method["topk_phi"]


def test_errors_of_the_hub_are_one_line(error_line: Callable[[pytest.ExceptionInfo[ValueError]], str]) -> None:
    from huggingface_hub import errors

    from residual_mass.inputs.hub_errors import asking

    def answered(error: type[Exception]) -> str:
        with pytest.raises(ValueError) as found, asking("org/model", "check the network"):
            raise error.__new__(error)
        return error_line(found)

    assert "access is restricted" in answered(errors.GatedRepoError)
    assert "not on the hub, or private" in answered(errors.RepositoryNotFoundError)
    assert answered(ConnectionError).endswith("check the network")
