"""`residual-mass measure` on a tiny model with random weights and byte tokens."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.conftest import byte_tokenizer, tiny_llama
from tests.needs import KERNELS, needs
from tests.small_hub import Repository, SmallHub, become, serving
from tests.unit.model.families import FAMILIES, Family, cases
from transformers import PreTrainedModel

from residual_mass import __main__, cli
from residual_mass.benchmarks import fidelity, force
from residual_mass.benchmarks.store import RowStore
from residual_mass.decode.backends import backend_for
from residual_mass.decode.text import Text
from residual_mass.diagnostics.packs import visit_layers
from residual_mass.files import read_json
from residual_mass.kernels import library
from residual_mass.measure import command, times
from residual_mass.measure.models import find_model
from residual_mass.measure.request import Request, add_arguments
from residual_mass.measure.texts import read_texts, windows
from residual_mass.methods.arms import arm_of
from residual_mass.model.loading import backbone_identity, load_backbone
from residual_mass.model.phi_maps import PhiMaps
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.settings import AnchorSpec, MapSpec
from residual_mass.spec.specs import BackboneSpec, FidelitySpec, ForceSpec

METHODS = ("topk", "topk_moments", "scan4_regression_64")
ARMS = (ArmSpec("full"), *(ArmSpec(method, budget) for method in METHODS for budget in (10.0, 20.0)))


class Found(NamedTuple):
    """The files of an answer."""

    folder: Path
    table: pd.DataFrame
    text: str
    settings: dict


def words(seed: int, count: int) -> str:
    """A text of so many characters and tokens."""
    rng = random.Random(seed)
    return " ".join("".join(rng.choices("abcdefgh", k=rng.randint(2, 7))) for _ in range(count))[:count]


def options_of(*arguments: str) -> Namespace:
    parser = ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


def parsed(*arguments: str) -> Request:
    return Request.of(options_of(*arguments))


def changed(asked: Namespace, **changes: object) -> Namespace:
    return Namespace(**(vars(asked) | changes))


def measure(asked: Namespace, **changes: object) -> Found:
    """Runs the command with changed flags."""
    options = changed(asked, **changes)
    command.run(options)
    settings = max(options.out.rglob("settings.json"), key=lambda path: path.stat().st_mtime_ns)
    table = pd.read_csv(settings.with_name("measured.csv"), keep_default_na=False, na_values=[""])
    return Found(settings.parent, table, settings.with_name("measured.txt").read_text(), read_json(settings))


@pytest.fixture(scope="session")
def model(benchmark_assets: Path) -> str:
    return str(benchmark_assets / "models" / "tiny-llama")


@pytest.fixture
def asked(model: str, benchmark_assets: Path, tmp_path: Path) -> Namespace:
    """Two texts: a folder of a long file and short ones, and a corpus of the assets. topk is added to the methods."""
    folder = tmp_path / "notes"
    (folder / "deep").mkdir(parents=True)
    (folder / "long.txt").write_text(words(0, 3000))
    for number in range(4):
        (folder / "deep" / f"{number}.txt").write_text(words(number + 1, 200))
    return options_of(
        model, str(folder), "books", "--length", "256", "--documents", "3", "--tokens", "5", "--budgets", "10", "20%",
        "--methods", *METHODS[1:], "--device", "cpu", "--assets", str(benchmark_assets), "--out", str(tmp_path / "out"),
    )  # fmt: skip


def test_the_numbers_are_those_of_a_study(
    asked: Namespace, backbone_spec: BackboneSpec, benchmark_assets: Path, tmp_path: Path
) -> None:
    """The stages `force` and `fidelity` on the same corpus."""
    found = measure(asked)
    spec = ForceSpec(
        study="test", backbone=backbone_spec, length="256", corpora=("books",), documents=3, tokens=5, seed=0, asked=(),
        arms=ARMS, arms_of_documents=(), anchors=AnchorSpec(), truncate_to="1k", maps=(), recipe=1,
    )  # fmt: skip
    forced, out = tmp_path / "forced.parquet", tmp_path / "fidelity.csv"
    force.run(spec, benchmark_assets, [], [], tmp_path / "store.jsonl", forced)
    of_study = FidelitySpec(
        study="test", backbone=backbone_spec, length="256", recipe=1, bootstrap_resamples=1000, seed=0
    )
    fidelity.run(of_study, forced, out)
    numbers = pd.read_csv(out).query("state == 'own'").set_index(["metric", "method", "budget_percent"]).sort_index()
    table = found.table[found.table["text"] == "books"]
    assert len(table) == 6 and set(table["backend"]) == {"torch"} and "  largest  " in found.text
    for row in table.itertuples():
        arm = row.method, row.budget_percent
        expected = [*numbers.loc[("kl", *arm)][["value", "ci_low", "ci_high"]]]
        expected += [numbers.loc[(metric, *arm)]["value"] for metric in ("kl_max", "same_top")]
        expected.append(row.kl / numbers.loc[("kl", "topk", row.budget_percent)]["value"])
        measured = [row.kl, row.ci_low, row.ci_high, row.kl_tail, row.same_top, row.kl_over_topk]
        assert measured == pytest.approx(expected, rel=1e-5)
    assert (table["seconds"] > 0).all() and (table["seconds_full"] > 0).all()
    tokens = pd.read_parquet(found.folder / "tokens.parquet")
    assert len(tokens) == 2 * 6 * 3 * 5 and tokens["position"].max() == 4
    means = tokens[tokens["text"] == "books"].groupby(["method", "budget_percent"])["kl"].mean()
    assert means["topk", 10.0] == pytest.approx(table.query("method == 'topk'")["kl"].iloc[0], rel=1e-5)


def test_an_interrupted_run_goes_on_and_ends_alike(
    asked: Namespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = measure(asked, out=asked.out.with_name("undisturbed"))
    append, calls = RowStore.append, []

    def append_twice(store: RowStore, rows: list[dict]) -> None:
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(len(rows))
        append(store, rows)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RowStore, "append", append_twice)
        measure(asked)
    with caplog.at_level(logging.INFO):
        found = measure(asked)
    assert f"{36 - sum(calls)} of 36 rows to compute; {sum(calls)} in " in caplog.text and sum(calls) == 12
    for name in ("store.jsonl", f"{found.folder.name}/tokens.parquet"):
        assert (asked.out / name).read_bytes() == (asked.out.with_name("undisturbed") / name).read_bytes()
    times = ["seconds", "seconds_full"]
    pd.testing.assert_frame_equal(found.table.drop(columns=times), expected.table.drop(columns=times))
    store = asked.out / "store.jsonl"
    first, *rest = store.read_text().splitlines(keepends=True)
    for damage in ([0.0], [None] * 5, "of 5"):
        store.write_text("".join((json.dumps(json.loads(first) | {"kl": damage}) + "\n", *rest)))
        with pytest.raises(ValueError, match=r"store.jsonl: row \w+ has no kl of 5 tokens; delete the line"):
            measure(asked)


def test_an_answer_is_written_and_not_overwritten_by_another(asked: Namespace) -> None:
    """No fast step serves heads of 16 channels: the answer begins with that, and shows what reads the fewest bytes."""
    found = measure(asked, target_kl=100.0)
    assert not found.table["recommended"].any()
    text = " ".join(found.text.split())
    assert "Nothing is faster here than full attention: torch alone serves these methods (the ker" in text
    fewest = found.table.groupby(["method", "budget_percent"], sort=False)["read"].mean().idxmin()
    assert f"fewest bytes {fewest[0]} at {fewest[1]:g} % reads " in text and "by torch only, no faster here" in text
    assert f'partial_decoding(method="{fewest[0]}", budget={fewest[1] / 100:g})' in text
    assert "Limits of this answer" in text and (found.folder / "measured.png").stat().st_size > 10_000
    assert found.table.groupby(["text", "method", "budget_percent"]).ngroups == len(found.table) == 12
    for row in found.table.itertuples():
        assert f"{row.kl:.2g}" in text and f"{row.kl_over_topk:.2g}" in text
    before = {path: path.read_bytes() for path in found.folder.iterdir()}
    assert measure(asked, target_kl=50.0).folder.name == f"{found.folder.name}-2"
    assert {path: path.read_bytes() for path in found.folder.iterdir()} == before
    assert measure(asked, target_kl=100.0).folder == found.folder


def test_bytes_are_those_of_the_tokens_that_are_read(
    asked: Namespace, backbone_spec: BackboneSpec, benchmark_assets: Path
) -> None:
    """TopK's tokens, found again by sorting each head's scores in float64."""
    asked = changed(asked, methods=["topk"], budgets=["12.5"], texts=["books"])
    table = measure(asked).table
    backbone = load_backbone(backbone_spec, benchmark_assets, torch.device("cpu"))
    (text,) = read_texts(Request.of(asked), backbone.tokenizer)
    sequence, length, k, read = text.sequences[0], 256, 32 - 20, []

    def visit(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> None:
        group = queries.shape[0] // keys.shape[0]
        for head, of_head in enumerate(keys.double()):
            for query in range(queries.shape[1]):
                rows = queries[head * group : (head + 1) * group, query].double() @ of_head.T
                tokens = {int(t) + 4 for row in rows for t in row[4 : length - 16].argsort(descending=True)[:k]}
                read.append(len(tokens) + 20)

    visit_layers(backbone, sequence[: length + 8], length, visit)
    share = (length + sum(read) / len(read)) / (2 * length)  # all keys, and the values of what is read
    assert table["read"].tolist() == pytest.approx([share], rel=1e-5) and table["kept"].tolist() == [1]


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
    assert len(found) == min(count, sum(length // size for length in lengths))


def test_short_files_are_joined_and_long_ones_cut(asked: Namespace) -> None:
    tokenizer = byte_tokenizer()
    notes, books = read_texts(Request.of(changed(asked, documents=20)), tokenizer)
    assert {len(sequence) for sequence in (*notes.sequences, *books.sequences)} == {262}
    texts = [tokenizer.decode(sequence) for sequence in notes.sequences]
    assert any(words(1, 200)[:50] in text and words(2, 200)[:50] in text for text in texts), "two short files together"
    assert sum(text.strip() in words(0, 3000) for text in texts) >= 3


def test_a_first_argument_that_is_a_file_is_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gpl3.txt").write_text("text")
    for arguments in (["gpl3.txt"], ["smol", "gpl3.txt"]):
        found = parsed(*arguments)
        assert (found.model, found.texts) == ("smol", ("gpl3.txt",))
    assert parsed("code").texts == ("code",)


WRONG = {
    "no such model": (["{tmp}/none", "{text}"], "none: no such file or folder, and no name on the hub"),
    "a model without its owner": (["gpt2", "{text}"], "gpt2: no such file .* OWNER/NAME"),
    "a folder without a model": (["{tmp}", "{text}"], r"no config\.json"),
    "a model of pickles": (["{tmp}/pickle", "{text}"], r"no \*\.safetensors"),
    "no such text": (["{model}", "{tmp}/none.txt"], "none.txt: No such file"),
    "a binary text": (["{model}", "{tmp}/binary"], "binary: not a text"),
    "a text with zeros": (["{model}", "{tmp}/zeros"], "zeros: empty, or holds bytes that no text has"),
    "a short text": (["{model}", "{tmp}/short.txt"], r"text files: \d+ tokens, and .* 545 .*--length"),
    "a method that needs maps": (["{model}", "{text}", "--methods", "topk_phi"], "topk_phi needs feature maps.*--phi"),
    "full attention": (["{model}", "{text}", "--methods", "full"], "--methods: full is what"),
    "a budget as a share": (["{model}", "{text}", "--budgets", "0.02"], "budget 0.02 may mean 2 % or 0.02 %"),
    "a length beyond the model": (["{model}", "{text}", "--length", "64k"], "65,569 tokens, and .* was made for"),
    "no documents": (["{model}", "{text}", "--documents", "0"], "--documents is 0, not 1 or more"),
    "a target of zero": (["{model}", "{text}", "--target-kl", "0"], "--target-kl is 0"),
    "an absent GPU": (["{model}", "{text}", "--device", "cuda:7"], "--device cuda:7: torch cannot use it here"),
    "maps that are none": (["{model}", "{text}", "--methods", "topk_phi", "--phi", "{tmp}/text.txt"], "text.txt"),
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
    assert stopped.value.code == 2 and len(errors) == 1 and errors[0].startswith("residual-mass measure: error: ")
    assert re.search(message, errors[0]), errors[0]
    assert not list((tmp_path / "out").rglob("measured.*"))


@pytest.mark.parametrize("package", ["pandas", "gguf", "jinja2", "matplotlib"])
def test_a_missing_package_names_the_extra(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "residual_mass.measure.page", raising=False)
    monkeypatch.setattr(sys, "argv", ["residual-mass", "measure"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        __main__.main()
    assert stopped.value.code == (
        f"residual-mass: error: the package {package} is missing; run pip install '.[measure]' in a checkout"
    )
    assert not list(tmp_path.iterdir())


# ---- models of a hub, which this machine serves ----------------------------------------------------------------------


@pytest.fixture
def hub(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallHub]:
    """For one test, without a login, and with an empty cache."""
    files = {file.name: file.read_bytes() for file in Path(model).iterdir()}
    repositories = {
        "models/someone/open": Repository("a" * 40, files),
        "models/someone/gated": Repository("b" * 40, files, gated=True),
    }
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with serving(SmallHub(repositories)) as small:
        become(small, tmp_path, monkeypatch)
        yield small


def measure_from_the_hub(model: str, folder: Path) -> None:
    (folder / "a.txt").write_text("The cat sat on the mat, and the dog looked on. " * 60)
    options = "--length 128 --tokens 4 --documents 3 --methods topk --device cpu"
    cli.main(["measure", model, str(folder / "a.txt"), *options.split(), "--out", str(folder / "found")])


def test_a_model_is_fetched_once(
    hub: SmallHub, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    measure_from_the_hub("someone/open", tmp_path)
    assert capsys.readouterr().out.startswith("open, prompts of 128 tokens: which step is the fastest here within 0.01")
    fetched = [*hub.fetched]
    assert "someone/open/model.safetensors" in fetched and len(set(fetched)) == len(fetched)
    with caplog.at_level(logging.INFO):
        measure_from_the_hub("someone/open", tmp_path)
    assert hub.fetched == fetched
    assert "0 of" in caplog.text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("someone/gated", "access is restricted: accept its licence on its page on the hub, then set HF"),
        ("someone/else", "not on the hub, or private: check the name, or log in with `hf auth login`"),
    ],
)
def test_a_model_that_is_not_given_is_told_in_one_line(
    name: str, message: str, hub: SmallHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        measure_from_the_hub(name, tmp_path)
    assert stopped.value.code == 2
    assert f"{name}: {message}" in capsys.readouterr().err.splitlines()[-1]
    assert not [file for file in (tmp_path / "found").rglob("*") if file.is_file()]


def on_a_text(model: PreTrainedModel, folder: Path, options: str) -> Namespace:
    """A model and a text that are written into the folder."""
    model.save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    (folder / "a.txt").write_text(words(2, 8000))
    common = ("--tokens", "6", "--documents", "3", "--device", "cpu", "--out", str(folder / "out"))
    return options_of(str(folder / "model"), str(folder / "a.txt"), *common, *options.split())


def test_layers_with_a_window_stay_exact(tmp_path: Path) -> None:
    """Bytes are those of the other layers; with all of the prompt read exactly nothing changes."""
    model = next(each for each in FAMILIES if each.name == "gpt-oss").build(vocab_size=258)
    table = measure(on_a_text(model, tmp_path, "--length 128 --budgets 25 100 --methods topk topk_moments")).table
    found = {(each.method, each.budget_percent): each for each in table.itertuples()}
    assert found["topk", 25].kl > 1e-6 and found["topk", 25].read < 1
    for method in ("topk", "topk_moments"):
        assert found[method, 100].kl == pytest.approx(0, abs=1e-6) and float(found[method, 100].same_top) == 1


def test_an_answer_is_no_text_of_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the folder of the texts, where the model lies, too."""
    on_a_text(tiny_llama(layers=1), tmp_path, "")
    monkeypatch.chdir(tmp_path)
    options = "--length 64 --budgets 25 --methods topk --documents 3 --tokens 4 --device cpu"
    for out in ("measured", "."):
        asked = options_of("model", ".", *options.split(), "--out", out)
        found = [measure(asked) for _ in range(2)]
        assert found[0].folder == found[1].folder
        assert found[0].table["kl"].tolist() == found[1].table["kl"].tolist()
        assert "documents come from one file" in found[1].text and len(Path(out, "store.jsonl").open().readlines()) == 3


def test_out_of_memory_has_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = on_a_text(tiny_llama(layers=1), tmp_path, "")

    def fail(*arguments: object, **options: object) -> None:
        raise MemoryError

    reasons = {
        (Path, "open"): f"{tmp_path / 'a.txt'}: too large for the memory here; cut it, or leave it out",
        (command, "measure"): "out of memory; lower --tokens, or leave out methods",
    }
    for (owner, name), reason in reasons.items():
        monkeypatch.setattr(owner, name, fail)
        with pytest.raises(SystemExit) as stopped:
            cli.main(["measure", asked.model, *asked.texts, "--length", "64", "--out", str(asked.out)])
        line = capsys.readouterr().err.splitlines()[-1]
        assert stopped.value.code == 2 and line == f"residual-mass measure: error: {reason}"


@pytest.mark.parametrize("name", ["GPT-2", "OPT"])
def test_steps_are_timed_as_far_as_a_model_has_positions(name: str, tmp_path: Path) -> None:
    model = next(each for each in FAMILIES if each.name == name).build(vocab_size=258)
    longest = 512 - times.TIMED_TOKENS
    assert times.fits(model, longest) and not times.fits(model, longest + 1)
    asked = on_a_text(model, tmp_path, "--budgets 25 --methods topk --documents 2")
    message = rf"--length {longest + 1}: .* 513 tokens, and \w+ has positions for 512; choose --length {longest} or"
    with pytest.raises(ValueError, match=message):
        measure(asked, length=str(longest + 1))
    assert not list(asked.out.rglob("store.jsonl"))
    assert (measure(asked, length=str(longest)).table["seconds"] > 0).all()


@cases(each for each in FAMILIES if each.name in ("DeepSeek V2", "DeepSeek V3", "Gemma 3n"))
def test_models_are_timed_whatever_they_cache(family: Family, tmp_path: Path) -> None:
    """Latents of all heads, and layers that share the keys of others."""
    model = family.build(vocab_size=258)
    table = measure(on_a_text(model, tmp_path, "--length 64 --budgets 25 --methods topk")).table
    assert (table[["seconds", "seconds_full"]] > 0).all(axis=None)
    assert not times.fits(model, 4096)


@needs(KERNELS)
@pytest.mark.parametrize("tokens", [6, 70])
def test_numbers_are_those_of_what_serves_users(tokens: int, tmp_path: Path) -> None:
    """KL, bytes read and kept, decoded here step by step by the backend that serves a method, also where generated
    tokens join the prefix. One code that rounds to the other side changes a mean KL by less than a hundredth.
    """
    options = f"--length 200 --budgets 11 --methods cache8 scan4_regression_64 topk_moments --tokens {tokens}"
    asked = on_a_text(tiny_llama(width=64), tmp_path, options)
    found = measure(asked)
    packed = dict.fromkeys(("cache8", "scan4_regression_64"), "packed")
    assert found.settings["served"] == {"topk": "torch", "topk_moments": "torch", **packed}
    backbone = load_backbone(find_model(asked.model, asked.out, torch.device("cpu")), asked.out, torch.device("cpu"))
    model = backbone.model
    (text,) = read_texts(Request.of(asked), backbone.tokenizer)
    assert len(found.table) == 4, "a cache that is read whole has no budgets"
    for row in found.table.itertuples():
        arm = arm_of(row.method, None if row.method == "cache8" else 0.11)
        kls, reads, kept = [], [], []
        for sequence in text.sequences:
            ids = torch.tensor([sequence])
            with torch.no_grad():
                own = Text(model, backend_for(model, arm))
                assert own.backend.name == row.backend
                own.read(ids[:, :200])
                kept.append(own.backend.kept_bytes)
                steps = []
                for token in ids[:, 200:-1].split(1, 1):
                    steps.append(own.step(token)[0, -1].double().log_softmax(-1))
                    if row.backend == "packed":
                        reads.append(sum(layer.packed.read_bytes(2) for layer in own.backend.cache.layers))
                full = model(ids[:, :-1]).logits[0, 200:].double().log_softmax(-1)
            kls.append((full.exp() * (full - torch.stack(steps))).sum(-1).mean().item())
        assert row.kl == pytest.approx(sum(kls) / 3, rel=0.01, abs=1e-7)
        if row.backend == "packed":
            whole = 3 * 2 * 200 * 64 * 4  # layers, heads, tokens, width, bytes of a key and a value
            assert [row.read, row.kept] == pytest.approx([reads[0] / whole, kept[0] / whole], rel=1e-5)


@needs(KERNELS)
def test_rows_that_torch_decoded_are_not_taken_for_packed_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One store serves a machine with kernels and one without."""
    asked = on_a_text(tiny_llama(width=64, layers=1), tmp_path, "--length 128 --methods cache8 --budgets 25")
    with monkeypatch.context() as patch:
        patch.setenv("RESIDUAL_MASS_KERNELS", "off")
        library.load.cache_clear()
        found = measure(asked)
    library.load.cache_clear()
    assert set(found.table["backend"]) == {"torch"}
    store = asked.out / "store.jsonl"
    assert len(store.read_text().splitlines()) == 6
    assert measure(asked).table.set_index("method")["backend"]["cache8"] == "packed"
    assert len(store.read_text().splitlines()) == 9


def test_budgets_without_a_method_that_chooses_are_told(caplog: pytest.LogCaptureFixture) -> None:
    for options, told in (("", False), ("--budgets 25", True), ("--budgets 25 --methods cache8 topk_moments", False)):
        caplog.clear()
        request = parsed("m", "--methods", "cache8", *options.split())
        assert request.methods[0] == "topk"
        assert ("--budgets are those of topk alone: cache8 read all tokens" in caplog.text) == told


def rescaled(asked: Namespace, patch: pytest.MonkeyPatch) -> None:
    """Other weights in a file of the same size and time."""
    path = Path(asked.model, "model.safetensors")
    status = path.stat()
    tensors = load_file(path)
    tensors["model.layers.0.mlp.up_proj.weight"] *= 2
    save_file(tensors, path, {"format": "pt"})
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size


def reconfigured(asked: Namespace, patch: pytest.MonkeyPatch) -> None:
    path = Path(asked.model, "config.json")
    path.write_text(json.dumps(read_json(path) | {"rms_norm_eps": 0.1}))


def updated(asked: Namespace, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("transformers.__version__", "9.0")


def touched(asked: Namespace, patch: pytest.MonkeyPatch) -> None:
    for path in Path(asked.model).iterdir():
        os.utime(path, (1, 1))
    Path(asked.model, "README.md").write_text("words")


@pytest.mark.parametrize(("change", "rows"), [(touched, 3), (rescaled, 6), (reconfigured, 6), (updated, 6)])
def test_rows_are_of_the_model_that_is_measured(
    change: Callable[[Namespace, pytest.MonkeyPatch], None],
    rows: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the content of its files, and by the version that made a model of them."""
    asked = on_a_text(tiny_llama(layers=1), tmp_path, "--length 64 --budgets 25 --methods topk")
    before = measure(asked).table
    store = asked.out / "store.jsonl"
    assert len(store.read_text().splitlines()) == 3
    change(asked, monkeypatch)
    after = measure(asked).table
    assert len(store.read_text().splitlines()) == rows
    same = change in (touched, updated)
    assert (before["kl"].tolist() == after["kl"].tolist()) == same


@pytest.mark.parametrize("length", ["1", "2", "20"])
def test_prompts_of_few_tokens(length: str, tmp_path: Path) -> None:
    """Anchors are all of a prompt of 20: nothing is saved, and nothing is recommended."""
    options = f"--length {length} --budgets 50 100 --methods topk topk_moments --tokens 1"
    found = measure(on_a_text(tiny_llama(layers=1), tmp_path, options))
    assert found.table["kl"].tolist() == pytest.approx([0] * 4, abs=1e-6)
    assert found.table["kl_over_topk"].isna().all() and not found.table["recommended"].any()
    assert "Nothing is recommended: what stays below 0.01 nats reads no fewer bytes" in found.text
    assert "nan" not in found.text.lower() and " - " in found.text
    assert len(list(found.folder.iterdir())) == 6


def test_a_budget_of_everything_has_no_ratio(tmp_path: Path) -> None:
    options = "--length 128 --budgets 25 100 --methods topk topk_moments --target-kl 100"
    found = measure(on_a_text(tiny_llama(), tmp_path, options))
    ratio = found.table.set_index(["method", "budget_percent"])["kl_over_topk"]
    assert ratio["topk", 25] == 1 and ratio["topk_moments", 25] > 0 and ratio[:, 100].isna().all()
    assert re.search("fewest bytes +topk at 25 %", found.text) and "nan" not in found.text.lower()


def test_names_are_written_whatever_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model's folder `.`, and names of texts that CSV, JSON, mathematical titles or encodings would trip over."""
    asked = on_a_text(tiny_llama(layers=1), tmp_path, "")
    monkeypatch.chdir(asked.model)
    names = ["NA", "cost in $_ {^$", os.fsdecode(b"\xfcbung"), "two\nlines", 'a "b", 50 %', "\U0001d538" * 60]
    paths = ["NA", *(f"../{name}" for name in names[1:])]
    for name in paths:
        Path(name).mkdir()
        Path(name, "1.txt").write_text(words(len(name), 2000))
    options = "--length 64 --documents 2 --tokens 2 --methods topk --budgets 50 --device cpu --out".split()
    cli.main(["measure", ".", *paths, *options, str(tmp_path / "out")])
    out = capsys.readouterr().out
    assert out.startswith("model, prompts of 64 tokens: which step") and "\n../two\\nlines, 2 documents\n" in out
    (folder,) = {file.parent for file in (tmp_path / "out").rglob("measured.csv")}
    assert folder.name.startswith("model-NA-cost in $_ {^$-\\xfcbung-") and (folder / "measured.png").exists()
    shown = ["NA", *(f"../{name}" for name in (names[1], "\\xfcbung", "two\\nlines", *names[4:]))]
    table = pd.read_csv(folder / "measured.csv", keep_default_na=False)
    assert table["text"].tolist() == shown
    settings = read_json(folder / "settings.json")
    assert settings["texts"] == table["text"].tolist() and settings["model"] == str(tmp_path / "model")


def test_one_model_has_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However its folder is written, its rows are those of the store."""
    asked = on_a_text(tiny_llama(layers=1), tmp_path, "")
    (tmp_path / "alias").symlink_to("model")
    monkeypatch.chdir(tmp_path)
    device = torch.device("cpu")
    specs = [find_model(name, asked.assets, device) for name in (asked.model, "model", "model/", "./model", "alias")]
    monkeypatch.chdir("model")
    specs.append(find_model(".", asked.assets, device))
    assert len({backbone_identity(spec, asked.assets) for spec in specs}) == 1
    assert [spec.name for spec in specs] == ["model"] * 4 + ["alias", "model"]


def test_where_the_answer_cannot_be_written_is_told_before_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    asked = on_a_text(tiny_llama(layers=1), tmp_path, "")
    (tmp_path / "file").write_text("")
    asked.out.mkdir()
    (asked.out / "model-a-64").write_text("")  # the folder of the answer
    for out, place in ((tmp_path / "file", "file"), (asked.out, "model-a-64")):
        with caplog.at_level(logging.INFO), pytest.raises(SystemExit) as stopped:
            cli.main(["measure", asked.model, *asked.texts, "--length", "64", "--device", "cpu", "--out", str(out)])
        line = capsys.readouterr().err.splitlines()[-1]
        assert stopped.value.code == 2 and re.search(rf"error: .*{place}.*: cannot be written .* make room", line)
    assert "rows to compute" not in caplog.text


def test_feature_maps_take_part(
    asked: Namespace, backbone_spec: BackboneSpec, benchmark_assets: Path, tmp_path: Path
) -> None:
    """Maps of this model; those of another one are refused."""
    shape = load_backbone(backbone_spec, benchmark_assets, torch.device("cpu")).shape
    file = tmp_path / "own.safetensors"
    asked = changed(asked, methods=["topk", "topk_phi"], phi=file, texts=["books"])
    own = find_model(asked.model, asked.assets, torch.device("cpu"))
    for revision in ("another", own.revision):
        facts = {"model_id": own.model_id, "revision": revision, "length": 256}
        PhiMaps(shape, MapSpec(d_emb=8, d_phi=4), facts).save(file)
        if revision == "another":
            with pytest.raises(ValueError, match="trained on .*another"):
                measure(asked)
    read = measure(asked).table.query("budget_percent == 10").set_index("method")["read"]
    assert read["topk"] < read["topk_phi"]
