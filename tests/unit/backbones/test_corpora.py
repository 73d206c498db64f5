"""Corpora: exact lengths, reproducible sequences that are found again, held-out text that training never sees."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import aiohttp
import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import requests
from datasets.iterable_dataset import ExamplesIterable
from huggingface_hub import errors
from tests.conftest import byte_tokenizer
from transformers import PreTrainedTokenizerFast

from residual_mass.backbones import asset_texts, hub_stream
from residual_mass.backbones.corpora import (
    Cycle,
    PackedDocuments,
    check_corpora,
    held_out_corpus,
    independent_sequences,
    is_held_out,
    training_corpus,
)
from residual_mass.backbones.hub_stream import HubStream
from residual_mass.inputs.hub_data import HubText
from residual_mass.inputs.texts import MEASURED

TOKENIZER = byte_tokenizer()
PARTS = [f"Part {number} is told here.\n{'It goes on and on. ' * 7}END." for number in range(400)]
BOOKS = ["\n\n".join(PARTS[:200]), "\n\n".join(PARTS[200:])]


@pytest.fixture
def assets(tmp_path: Path) -> Path:
    (tmp_path / "qa").mkdir()
    (tmp_path / "corpora" / "sotu").mkdir(parents=True)
    items = [{"context": [[f"Title {i}", [f"Paragraph number {i}. ", "It ends."]]]} for i in range(200)]
    (tmp_path / "qa" / "hotpotqa.json").write_text(json.dumps(items))
    (tmp_path / "corpora" / "books").mkdir()
    (tmp_path / "corpora" / "books" / "books.txt").write_text(
        f"{BOOKS[0]}\nThe Project Gutenberg eBook of Emma\n\nThis header belongs to no book.\n\n"
        f"*** START OF THIS PROJECT GUTENBERG EBOOK EMMA ***\n\n\n{BOOKS[1]}\n\n\n"
        "End of Project Gutenberg's Emma\n\n*** END OF THIS PROJECT GUTENBERG EBOOK EMMA ***\n\nUpdated editions\n"
    )
    (tmp_path / "corpora" / "code").mkdir()
    for number in range(12):
        (tmp_path / "corpora" / "code" / f"module_{number:02d}.py").write_text(f"def f_{number}(x):\n    return x\n")
    for year in range(30):
        (tmp_path / "corpora" / "sotu" / f"{year}.txt").write_text(f"Fellow citizens of {year}. " * 40)
    return tmp_path


def test_sequences_have_the_length_and_repeat(assets: Path) -> None:
    corpus = training_corpus(["sotu", "wiki", "pydoc"], TOKENIZER, 300, 0, assets)
    first = [corpus.sequence(i) for i in range(6)]
    assert {len(ids) for ids in first} == {300}
    again = training_corpus(["sotu", "wiki", "pydoc"], TOKENIZER, 300, 0, assets)
    assert [again.sequence(i) for i in reversed(range(6))] == first[::-1]
    assert training_corpus(["sotu"], TOKENIZER, 300, 1, assets).sequence(0) != first[0]
    texts = [TOKENIZER.decode(ids) for ids in first]
    assert "citizens" in texts[0] and "Paragraph" in texts[1] and "citizens" in texts[3] and "Paragraph" in texts[4]


def test_training_never_sees_held_out_documents(assets: Path) -> None:
    held_out = held_out_corpus("wiki", TOKENIZER, 200, 0, assets)
    assert isinstance(held_out, PackedDocuments)
    (trained,) = training_corpus(["wiki"], TOKENIZER, 200, 0, assets).corpora
    assert isinstance(trained, PackedDocuments)
    assert 0 < len(held_out.documents) < 40 and len(held_out.documents) + len(trained.documents) == 200
    assert not set(held_out.documents) & set(trained.documents)
    assert all(is_held_out(d) for d in held_out.documents)


def test_bos_leads_where_the_tokenizer_adds_one() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    ids = PackedDocuments("text", ["abc " * 100], tokenizer, 50, 0).sequence(0)
    assert len(ids) == 50 and ids[0] == 0 and ids.count(0) == 1


def test_bad_corpora_are_named(assets: Path) -> None:
    with pytest.raises(ValueError, match="'poems' is unknown; known are sotu"):
        training_corpus(["poems"], TOKENIZER, 100, 0, assets)
    with pytest.raises(ValueError, match="'poems' is unknown; known are sotu"):
        held_out_corpus("poems", TOKENIZER, 100, 0, assets)
    for name in ("wikitext", "books", "code"):
        with pytest.raises(ValueError, match=f"'{name}' is held out"):
            training_corpus([name], TOKENIZER, 100, 0, assets)
    with pytest.raises(
        ValueError,
        match="'fineweb' is trained on, none is held out; choose sotu, wiki, pydoc, books, code or wikitext",
    ):
        held_out_corpus("fineweb", TOKENIZER, 100, 0, assets)
    with pytest.raises(ValueError, match="'text' is empty"):
        PackedDocuments("text", [], TOKENIZER, 100, 0)
    with pytest.raises(ValueError, match="'text' holds 7 tokens, fewer than one sequence of 100; choose a shorter"):
        PackedDocuments("text", ["short"], TOKENIZER, 100, 0).sequence(0)


def test_corpora_are_checked_without_a_tokenizer(assets: Path, tmp_path: Path) -> None:
    check_corpora(["sotu", "wiki", "fineweb"], assets, MEASURED)
    with pytest.raises(ValueError, match="'poems' is unknown"):
        check_corpora(["sotu", "poems"], assets)
    with pytest.raises(ValueError, match="'books' is held out"):
        check_corpora(["books"], assets)
    with pytest.raises(ValueError, match="'arxiv' is trained on"):
        check_corpora(["sotu"], assets, ["arxiv"])
    nothing = tmp_path / "nothing"
    for name, missing in (
        ("sotu", "corpora/sotu"), ("wiki", "qa/hotpotqa.json"),
        ("books", "corpora/books"), ("code", "corpora/code"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{re.escape(str(nothing / missing))}: no .* run the assets stage$"):
            check_corpora([], nothing, [name])


def test_books_are_held_out_whole_and_read_on_in_order(assets: Path) -> None:
    corpus = held_out_corpus("books", TOKENIZER, 25_000, 0, assets)
    assert isinstance(corpus, PackedDocuments)
    assert "\n\n".join(corpus.documents) == f"{BOOKS[0]}\n\n{BOOKS[1]}"
    sizes = [len(document) for document in corpus.documents]
    assert len(sizes) == 4 and all(abs(size - asset_texts.RUN_CHARACTERS) < 200 for size in (sizes[0], sizes[2]))
    text = TOKENIZER.decode(corpus.sequence(0))
    numbers = [int(number) for number in re.findall(r"Part (\d+) ", text)]
    assert len(numbers) > 100 and sum(b != a + 1 for a, b in zip(numbers, numbers[1:], strict=False)) <= 1


def test_code_is_held_out_whole_file_by_file(assets: Path) -> None:
    corpus = held_out_corpus("code", TOKENIZER, 60, 0, assets)
    assert isinstance(corpus, PackedDocuments)
    assert list(corpus.documents) == [f"def f_{number}(x):\n    return x\n" for number in range(12)]
    for ids in independent_sequences(corpus, 3):
        told = [int(number) for number in re.findall(r"def f_(\d+)", TOKENIZER.decode(ids))]
        assert len(told) > 1 and all(b == (a + 1) % 12 for a, b in zip(told, told[1:], strict=False))


def test_slots_of_documents_share_out_the_sequences(assets: Path) -> None:
    whole = training_corpus(["sotu", "wiki"], TOKENIZER, 100, 3, assets)
    slots = [training_corpus(["sotu", "wiki"], TOKENIZER, 100, 3, assets, slot, 3) for slot in range(3)]
    for each in range(2):
        for index in range(4):
            given = [slot.sequence(2 * index + each) for slot in slots]
            assert given == [whole.sequence(2 * (3 * index + slot) + each) for slot in range(3)]


def write_jsonl(file: Path, texts: list[str]) -> None:
    file.with_suffix(".jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def write_parquet(file: Path, texts: list[str]) -> None:
    # Row groups so small that lanes leave off within one.
    pq.write_table(pa.table({"text": texts}), file.with_suffix(".parquet"), row_group_size=3)


def document(number: int) -> str:
    return f"<{number}:" + "x" * (number * 13 % 60) + ">"


@pytest.fixture(params=[write_jsonl, write_parquet])
def hub(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of five shards with 40 documents, one of them blank, in the place of fineweb; small blocks."""
    folder = tmp_path / "data set"
    folder.mkdir()
    texts = [document(number) if number != 17 else " " for number in range(40)]
    for shard, (begin, end) in enumerate([(0, 11), (11, 18), (18, 19), (19, 32), (32, 40)]):
        request.param(folder / f"train-{shard:05}-of-00005", texts[begin:end])
    stand_in(monkeypatch, folder)
    return folder


def stand_in(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setitem(hub_stream.HUB, "fineweb", HubText(str(folder), None, "train", "text"))
    monkeypatch.setattr(hub_stream, "BLOCK", 8)
    monkeypatch.setattr(hub_stream, "LANES", 2)


NUMBERS = set(range(40)) - {17}


def numbers_of(stream: HubStream, sequences: int) -> list[int]:
    text = "".join(TOKENIZER.decode(stream.sequence(index)) for index in range(sequences))
    return [int(number) for number in re.findall(r"<(\d+):x*>", text)]


@pytest.mark.parametrize(("slot", "slots"), [(0, 1), (1, 2), (4, 7)])
def test_stream_is_found_again_at_every_index(hub: Path, slot: int, slots: int) -> None:
    undisturbed, wanted, positions = HubStream("fineweb", TOKENIZER, 90, 0, slot, slots), [], []
    while undisturbed.at.epoch < 2:
        positions.append(json.dumps(undisturbed.position()))
        wanted.append(undisturbed.sequence(len(wanted)))
    assert len(wanted) > 3 and max(map(len, positions)) < 2000
    for index, position in enumerate(positions):
        resumed = HubStream("fineweb", TOKENIZER, 90, 0, slot, slots)
        resumed.seek(json.loads(position))
        assert [resumed.sequence(i) for i in range(index, min(index + 3, len(wanted)))] == wanted[index : index + 3]


def test_stream_is_found_again_from_a_place_that_was_found_again(hub: Path) -> None:
    undisturbed = HubStream("fineweb", TOKENIZER, 90, 0)
    position = undisturbed.position()
    for index in range(35):
        resumed = HubStream("fineweb", TOKENIZER, 90, 0)
        resumed.seek(json.loads(json.dumps(position)))
        assert resumed.sequence(index) == undisturbed.sequence(index)
        position = resumed.position()


def test_stream_goes_back_and_skips(hub: Path) -> None:
    stream = HubStream("fineweb", TOKENIZER, 50, 0)
    wanted = [stream.sequence(index) for index in range(30)]
    assert [stream.sequence(index) for index in (4, 4, 9, 29, 0)] == [wanted[index] for index in (4, 4, 9, 29, 0)]


def test_stream_gives_every_document_once_an_epoch_in_another_order(hub: Path) -> None:
    first, other_seed = numbers_of(HubStream("fineweb", TOKENIZER, 10, 0), 500), HubStream("fineweb", TOKENIZER, 10, 1)
    epochs = [first[39 * epoch : 39 * (epoch + 1)] for epoch in range(3)]
    assert [set(epoch) for epoch in epochs] == [NUMBERS] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3 and sorted(NUMBERS) not in epochs
    assert numbers_of(other_seed, 100) != first[: len(numbers_of(other_seed, 100))]
    shard_of = [sum(number >= begin for begin in (11, 18, 19, 32)) for number in epochs[0]]
    assert len(set(shard_of[:8])) > 1  # the first block is of several shards


@pytest.mark.parametrize("slots", [2, 5, 7])
def test_slots_of_a_stream_share_out_the_documents_for_good(hub: Path, slots: int) -> None:
    streams = [HubStream("fineweb", TOKENIZER, 10, 0, slot, slots) for slot in range(slots)]
    given = []
    for stream in streams:
        sequences = 0
        while stream.at.epoch < 3:
            stream.sequence(sequences)
            sequences += 1
        given.append(set(numbers_of(stream, sequences)))
    assert sum(map(len, given)) == len(NUMBERS) and set().union(*given) == NUMBERS


def test_resuming_tokenises_what_it_gives_and_no_more(hub: Path) -> None:
    counted: list[str] = []

    class Counting(PreTrainedTokenizerFast):
        def __call__(self, text: str, **options: Any) -> Any:  # type: ignore[override]
            counted.append(text)
            return super().__call__(text, **options)

    tokenizer = byte_tokenizer()
    tokenizer.__class__ = Counting
    stream = HubStream("fineweb", tokenizer, 50, 0)
    stream.sequence(200)
    position = stream.position()
    resumed = HubStream("fineweb", tokenizer, 50, 0)
    resumed.seek(position)
    counted.clear()
    assert resumed.sequence(201) == stream.sequence(201)
    assert 2 <= len([text for text in counted if "<" in text]) <= 12  # two streams of a few documents each


def test_cycle_of_both_kinds_is_found_again(hub: Path, assets: Path) -> None:
    undisturbed = training_corpus(["fineweb", "sotu", "wiki"], TOKENIZER, 50, 0, assets)
    wanted, positions = [], []
    for index in range(12):
        positions.append(json.dumps(undisturbed.position()))
        wanted.append(undisturbed.sequence(index))
    for index, position in enumerate(positions):
        resumed = training_corpus(["fineweb", "sotu", "wiki"], TOKENIZER, 50, 0, assets)
        resumed.seek(json.loads(position))
        assert [resumed.sequence(i) for i in range(index, 12)] == wanted[index:]


def test_a_test_split_is_read_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [document(number) for number in range(30)]
    for shard in range(3):
        write_jsonl(tmp_path / f"test-{shard:05}-of-00003", texts[10 * shard : 10 * (shard + 1)])
    monkeypatch.setitem(hub_stream.HUB, "wikitext", HubText(str(tmp_path), None, "test", "text"))
    monkeypatch.setattr(hub_stream, "BLOCK", 7)
    stream = held_out_corpus("wikitext", TOKENIZER, 64, 0, tmp_path)
    everything = TOKENIZER("".join(t + "\n\n" for t in texts) * 2, add_special_tokens=False).input_ids
    for index in range(len(everything) // 64):
        assert stream.sequence(index) == everything[64 * index : 64 * (index + 1)]


def test_independent_sequences_share_no_document() -> None:
    """Documents of about 60 to 260 tokens, of which a sequence takes up to four, the last one before the first."""
    texts = [f"{number:03}." * (15 + 7 * number % 51) for number in range(30)]
    corpus = PackedDocuments("text", texts, TOKENIZER, 200, 0)
    for count in (1, 4):
        assert independent_sequences(corpus, count) == independent_sequences(corpus, 4)[:count]
    every = independent_sequences(corpus, 30)
    assert 4 < len(every) < 30 and {len(ids) for ids in every} == {200}
    of = [set(re.findall(r"(?<!\d)\d{3}(?=\.)", TOKENIZER.decode(ids))) for ids in every]
    assert max(map(len, of)) > 1 and sum(map(len, of)) == len(set.union(*of))


def test_independent_sequences_of_a_stream_end_where_it_begins_again(hub: Path) -> None:
    stream = HubStream("fineweb", TOKENIZER, 90, 0)
    found = independent_sequences(stream, 1000)
    numbers = numbers_of(stream, len(found))
    assert len(numbers) == len(set(numbers)) > 30  # no text twice
    assert found == [stream.sequence(index) for index in range(len(found))] and not stream.begins_again()
    stream.sequence(len(found))
    assert stream.begins_again()
    assert independent_sequences(HubStream("fineweb", TOKENIZER, 90, 0), 3) == found[:3]


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_data_set_of_another_form_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def first(*texts: str, column: str = "text", length: int = 10, slots: int = 1) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        (folder / "train.jsonl").write_text("".join(json.dumps({column: text, "id": 1}) + "\n" for text in texts))
        stand_in(monkeypatch, folder)
        return error_of(lambda: HubStream("fineweb", TOKENIZER, length, 0, slots - 1, slots).sequence(0))

    error = first("a text", column="body")
    assert error.startswith("corpus 'fineweb': data set ") and "no column 'text', only body, id; name the one" in error
    assert "'fineweb' is empty" in first(" ", "") and "no text in column 'text'; choose sotu" in first("")
    assert "'fineweb' holds 14 tokens, fewer than one sequence of 100" in first("short", "short", length=100)
    assert "'fineweb' (slot 2 of 3) is empty" in first("one text", "another text", slots=3)
    packed = HubStream("fineweb", TOKENIZER, 20, 0)
    assert len(packed.sequence(0)) == 20  # of texts that are shorter


class Flaky:
    """A streamed data set of two shards whose reading fails at one document, as often as it is told to."""

    def __init__(self, error: Exception, times: int):
        self.error, self.left = error, times

    def rows(self, shards: list[int]) -> Iterator[tuple[int, dict[str, str]]]:
        """The library takes a list for what it may split."""
        for shard in shards:
            for number in range(20 * shard, 20 * (shard + 1)):
                if number == 13 and self.left:
                    self.left -= 1
                    raise self.error
                yield number, {"text": document(number)}

    def load_dataset(self, *args: object, **options: object) -> datasets.IterableDataset:
        return datasets.IterableDataset(ExamplesIterable(self.rows, {"shards": [0, 1]}))


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that would have been waited."""
    seconds: list[float] = []
    monkeypatch.setattr(hub_stream.time, "sleep", seconds.append)
    return seconds


try:
    from huggingface_hub.utils import httpx
except ImportError:  # a version from before the library had a client of its own
    import httpx


def reply(status: int) -> httpx.Response:
    return httpx.Response(status, request=httpx.Request("GET", "http://hub"))


PASSING = [
    ConnectionError("Server Disconnected"),
    TimeoutError(),
    OSError("reset"),
    httpx.ConnectError("no route"),
    httpx.ReadTimeout("slow"),
    requests.ConnectionError("no route"),
    aiohttp.ClientPayloadError("cut short"),
    errors.HfHubHTTPError("busy", response=reply(429)),
    errors.HfHubHTTPError("broken", response=reply(503)),
    errors.XetDownloadError("cut short"),
]
LASTING = [
    datasets.exceptions.DatasetNotFoundError("it is gone"),
    datasets.exceptions.DatasetGenerationError("it cannot be parsed"),
    errors.GatedRepoError("it asks for access", response=reply(403)),
    errors.RepositoryNotFoundError("it is gone", response=reply(404)),
    getattr(errors, "RemoteEntryNotFoundError", errors.EntryNotFoundError)("a file is gone", response=reply(404)),
    errors.OfflineModeIsEnabled("HF_HUB_OFFLINE is set"),
    FileNotFoundError("a file is gone"),
    PermissionError("it is closed"),
    pa.ArrowInvalid("it is no parquet file"),
]


def named(error: Exception) -> str:
    return type(error).__name__


@pytest.mark.parametrize("error", PASSING, ids=named)
def test_a_failure_that_passes_leaves_no_mark(
    error: Exception, waited: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sequences(times: int) -> list[list[int]]:
        monkeypatch.setattr(datasets, "load_dataset", Flaky(error, times).load_dataset)
        monkeypatch.setattr(hub_stream, "BLOCK", 8)
        stream = HubStream("fineweb", TOKENIZER, 50, 0)
        return [stream.sequence(index) for index in range(40)]

    assert sequences(0) == sequences(3)
    assert waited == list(hub_stream.WAITS) == sorted(set(waited))
    waited.clear()
    assert "fineweb" in error_of(lambda: sequences(4)) and len(waited) == 3


@pytest.mark.parametrize("error", LASTING, ids=named)
def test_a_failure_that_lasts_is_told_at_once(
    error: Exception, waited: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "load_dataset", Flaky(error, 1).load_dataset)
    monkeypatch.setattr(hub_stream, "BLOCK", 8)
    stream = HubStream("fineweb", TOKENIZER, 50, 0)
    told = error_of(lambda: stream.sequence(39))
    assert told.startswith(f"corpus 'fineweb': data set HuggingFaceFW/fineweb cannot be read ({named(error)}: ")
    assert told.endswith("log in with `hf auth login` if the data set asks for access, or choose sotu, wiki or pydoc")
    assert str(error).splitlines()[0] in told and waited == []
    position = stream.position()  # the stream is where it was, so that a checkpoint written now is sound
    assert 0 < position["index"] < 39
    resumed, undisturbed = HubStream("fineweb", TOKENIZER, 50, 0), HubStream("fineweb", TOKENIZER, 50, 0)
    resumed.seek(position)
    for index in range(position["index"], 39):
        assert stream.sequence(index) == resumed.sequence(index) == undisturbed.sequence(index)


@pytest.fixture
def closed_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, str], None]]:
    """A hub on this machine that refuses every request: with a status and the hub's own code for the reason."""
    answer: list[Any] = [500, ""]

    class Refusing(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(answer[0])
            self.send_header("X-Error-Code", answer[1])
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield lambda status, code: answer.__setitem__(slice(None), [status, code])
        server.shutdown()
        thread.join()


def test_a_hub_that_refuses_is_told_in_one_line(
    closed_hub: Callable[[int, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told() -> str:
        return error_of(lambda: HubStream("fineweb", TOKENIZER, 50, 0).sequence(0))

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    for status, code, reason in (
        (403, "GatedRepo", "DatasetNotFoundError: Dataset 'HuggingFaceFW/fineweb' is a gated dataset on the Hub"),
        (404, "RepoNotFound", "DatasetNotFoundError: Dataset 'HuggingFaceFW/fineweb' doesn't exist on the Hub"),
    ):
        closed_hub(status, code)
        assert f"cannot be read ({reason}" in told() and "`hf auth login`" in told()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    assert "cannot be read (ConnectionError: Couldn't reach" in told() and "check the network" in told()


def test_a_data_set_that_has_grown_is_told_in_one_line(hub: Path) -> None:
    stream = HubStream("fineweb", TOKENIZER, 50, 0)
    stream.sequence(0)
    shard = next(hub.iterdir())
    (hub / f"train-more{shard.suffix}").write_bytes(shard.read_bytes())
    resumed = HubStream("fineweb", TOKENIZER, 50, 0)
    resumed.seek(stream.position())
    assert "has 6 shards, but had 5 when the run was interrupted; delete the" in error_of(lambda: resumed.sequence(1))


def test_a_data_set_that_has_moved_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test.jsonl").write_text('{"text": "of another split"}\n')
    stand_in(monkeypatch, tmp_path)
    assert "cannot be read (ValueError: Bad split: train" in error_of(
        lambda: HubStream("fineweb", TOKENIZER, 10, 0).sequence(0)
    )
    stand_in(monkeypatch, tmp_path / "nowhere")
    assert "cannot be read (" in error_of(lambda: HubStream("fineweb", TOKENIZER, 10, 0).sequence(0))


def test_cycle_is_one_to_one() -> None:
    a, b = (PackedDocuments(name, [name * 400], TOKENIZER, 10, 0) for name in ("a", "b"))
    assert [TOKENIZER.decode(Cycle([a, b]).sequence(i))[0] for i in range(4)] == ["a", "b", "a", "b"]
