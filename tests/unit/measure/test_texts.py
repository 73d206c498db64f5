"""Texts for `residual-mass measure`: where documents begin and lie, encodings, names, and what is no text."""

from __future__ import annotations

import logging
import os
import socket
import tracemalloc
from pathlib import Path

import pytest
from tests.conftest import byte_tokenizer
from tests.unit.measure.test_measuring import parsed, words
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from residual_mass.measure.request import Request
from residual_mass.measure.texts import BYTES_AT_ONCE, CHARACTERS, Documents, read_texts, windows
from residual_mass.texts.corpora import SEPARATOR

LATIN = os.fsdecode(b"\xfcbung")
"""A name in Latin-1, as Linux allows it."""


def asked(*names: str | Path, documents: int = 6, options: str = "--length 127") -> Request:
    """Documents of 160 tokens with the default options."""
    return parsed("m", *map(str, names), *options.split(), "--documents", str(documents))


def found_in(*names: str | Path, **options: object) -> list[Documents]:
    return read_texts(asked(*names, **options), byte_tokenizer())


def numbered(lines: int) -> str:
    """Lines of ten bytes, each of which says its place."""
    return "".join(f"{number:09d}\n" for number in range(lines))


def places(text: Documents, lines: int) -> list[float]:
    """Where documents of a numbered text begin, as shares of it."""
    return [int(byte_tokenizer().decode(ids).split("\n")[1]) / lines for ids in text.sequences]


@pytest.mark.parametrize("documents", [2, 6, 32])
def test_documents_of_a_long_file_lie_all_over_it(documents: int, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text(numbered(100_000))
    (text,) = found_in(tmp_path / "long.txt", documents=documents)
    expected = [number / (documents - 1) for number in range(documents)]
    assert places(text, 100_000) == pytest.approx(expected, abs=0.03)
    assert text.read == CHARACTERS * 160 * documents / 1_000_000 and text.sources == 1


def test_a_file_that_is_read_whole_is_cut_as_it_is(tmp_path: Path) -> None:
    content = numbered(CHARACTERS * 160 * 6 // 10)
    (tmp_path / "a.txt").write_text(content)
    (text,) = found_in(tmp_path / "a.txt")
    ids = byte_tokenizer()(content + SEPARATOR, add_special_tokens=False).input_ids
    assert text == Documents("files", windows([ids], 160, 6), 1)


def test_a_part_begins_with_a_character_and_a_word(tmp_path: Path) -> None:
    """Characters of two to four bytes, and words of many characters."""
    for content in ("Übung macht 🦜 den Meister, 量子 sagt man. " * 3000, "量子🦜" * 20_000):
        (tmp_path / "wide.txt").write_text(content, encoding="utf-8")
        (text,) = found_in(tmp_path / "wide.txt")
        begins = [byte_tokenizer().decode(ids[:12]) for ids in text.sequences]
        assert len(begins) == 6 and not any(begin.startswith("\ufffd") for begin in begins)
        assert " " not in content or all(begin.startswith(" ") for begin in begins[1:])


def test_more_is_read_where_tokens_have_many_characters(tmp_path: Path) -> None:
    vocabulary = {f"{letter * 50}": index for index, letter in enumerate("abcdefgh")}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="a" * 50))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Whitespace(), decoders.Fuse()
    (tmp_path / "long.txt").write_text(" ".join(vocabulary) * 5000)
    (text,) = read_texts(asked(tmp_path / "long.txt"), PreTrainedTokenizerFast(tokenizer_object=inner))
    assert len(text.sequences) == 6 and CHARACTERS * 160 * 6 / 2_000_000 < text.read < 1


def test_files_of_documents_are_counted_as_they_are(tmp_path: Path) -> None:
    """One long file beside short ones gives all documents, or some of each."""
    (tmp_path / "a.txt").write_text(words(0, 20_000))
    for number in range(5):
        (tmp_path / f"b{number}.txt").write_text(words(number + 1, 170))
    (text,) = found_in(tmp_path, documents=3)
    whole = byte_tokenizer().decode([token for ids in text.sequences for token in ids])
    sources = sum(words(number + 1, 170)[40:80] in whole for number in range(5)) + (words(0, 20_000)[:100] in whole)
    assert text.sources == sources < 3


def test_a_folder_of_a_gigabyte_is_not_tokenised(tmp_path: Path) -> None:
    """Files at equal distances are."""
    for number in range(300):
        (tmp_path / f"{number:03d}.txt").write_text(f"{number:09d}\n" * 300)
    (text,) = found_in(tmp_path, documents=1)
    assert text.read < 0.5
    (text,) = found_in(tmp_path, documents=4)
    files = [int(byte_tokenizer().decode(ids).split("\n")[1]) for ids in text.sequences]
    assert files == sorted(files) and files[0] < 30 and files[-1] > 200 and text.sources == 4


@pytest.mark.parametrize("template", ["", "<s> $A", "[gMASK] <sop> $A", "[gMASK] <sop> $A </s>", "<s> $A </s>"])
def test_documents_begin_as_the_tokenizer_begins_a_text(template: str, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[gMASK]", "<sop>"]})
    names = [name for name in template.split() if name != "$A"]
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(names), strict=True))
    if template:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=[*ids.items()])
    front = [ids[name] for name in template.partition("$A")[0].split()]
    (tmp_path / "a.txt").write_text(words(0, 5000))
    (text,) = read_texts(asked(tmp_path / "a.txt"), tokenizer)
    for sequence in text.sequences:
        assert sequence[: len(front)] == front and len(sequence) == 160
        assert not {*sequence[len(front) :]} & {*ids.values()}
    if len(front) > 1:
        with pytest.raises(ValueError, match="--length 1: a text begins with 2 special tokens; choose a longer one"):
            read_texts(asked(tmp_path / "a.txt", options="--length 1"), tokenizer)


def test_names_of_special_tokens_are_text_unless_asked(tmp_path: Path) -> None:
    (tmp_path / "chat.txt").write_text("A turn ends by </s>, a text begins by <s>. " * 100)
    (tmp_path / "plain.txt").write_text("A turn ends by a dot. " * 100)
    for options, count, special in (("--length 127", 0, "<s>"), ("--length 127 --special-tokens", 4, "<s>")):
        (text,) = found_in(tmp_path / "chat.txt", options=options)
        assert [sum(token in (0, 1) for token in ids) >= count for ids in text.sequences] == [True] * 6
        assert text.special == special and (count or not any({0, 1} & {*ids} for ids in text.sequences))
    assert found_in(tmp_path / "plain.txt")[0].special == ""


def test_encodings_and_line_ends_make_no_difference(tmp_path: Path) -> None:
    content = "Zeilen über 量子\nund andere\n\n" * 200
    variants = {
        "mark": content.encode("utf-8-sig"), "utf-16": content.encode("utf-16"),
        "utf-16-be": b"\xfe\xff" + content.encode("utf-16-be"), "utf-32": content.encode("utf-32"),
        "crlf": content.replace("\n", "\r\n").encode(), "cr": content.replace("\n", "\r").encode(),
    }  # fmt: skip
    (tmp_path / "plain").write_bytes(content.encode())
    expected = found_in(tmp_path / "plain")
    for name, data in variants.items():
        (tmp_path / name).write_bytes(data)
        assert found_in(tmp_path / name) == expected, name


def test_what_is_no_text_is_refused_by_name_and_left_out_of_a_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    os.mkfifo(folder / "pipe")  # nobody writes to it
    (folder / "loop").symlink_to("loop")
    (folder / "gone").symlink_to("nothing")
    (folder / "round").symlink_to(folder)
    (folder / "latin.txt").write_bytes("für ".encode("latin-1") * 100)
    (folder / "utf-16.txt").write_bytes("ohne Marke".encode("utf-16-le"))
    (folder / "empty.txt").write_text("")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "socket"))
        refused = {
            "pipe": "neither a file nor a folder; write the text to a file", "socket": "neither a file nor a folder",
            "loop": "Too many levels", "gone": "No such file", "latin.txt": "not a text in UTF-8.*convert it",
            "utf-16.txt": "empty, or holds bytes that no text has", "empty.txt": "empty, or",
            "x" * 300: "File name too long",
        }  # fmt: skip
        for name, message in refused.items():
            with pytest.raises(ValueError, match=f"{name}: {message}"):
                found_in(folder / name)
        with pytest.raises(ValueError, match=r"/dev/null: neither a file"):
            found_in("/dev/null")
        with pytest.raises(ValueError, match=r"folder: no text in this folder \(.*\); name one with text files"):
            found_in(folder)
        (folder / "text.txt").write_text(words(0, 2000))
        (folder / "alias.txt").symlink_to("text.txt")
        with caplog.at_level(logging.WARNING):
            (text,) = found_in(folder)
    assert text.sources == 1 and "folder: 7 files left out" in caplog.text
    assert text.sequences == found_in(folder / "text.txt")[0].sequences


def test_what_is_no_text_is_not_read_whole(tmp_path: Path) -> None:
    """A file of 256 MiB, which takes no room on the disk, beside a text, and named."""
    (tmp_path / "text.txt").write_text(words(0, 2000))
    binary = tmp_path / "weights.bin"
    for head, message in ((b"", "empty, or holds bytes"), (b"\xff\xfe\x00\xd8\x00\x00", "not a text in UTF-8")):
        with binary.open("wb") as file:
            file.write(head)
            file.truncate(2**28)
        tracemalloc.start()
        try:
            (text,) = found_in(tmp_path)
            with pytest.raises(ValueError, match=f"weights.bin: {message}"):
                found_in(binary)
            assert tracemalloc.get_traced_memory()[1] < 2**24
        finally:
            tracemalloc.stop()
        assert text.sequences == found_in(tmp_path / "text.txt")[0].sequences


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_a_character_may_lie_in_two_pieces(encoding: str, tmp_path: Path) -> None:
    content = "a" + "🦜é量" * (BYTES_AT_ONCE // 3)
    expected = windows([byte_tokenizer()(content + SEPARATOR, add_special_tokens=False).input_ids], 160, 2000)
    (tmp_path / "long.txt").write_bytes(content.encode(encoding))
    assert found_in(tmp_path / "long.txt", documents=2000)[0].sequences == expected
    (tmp_path / "long.txt").write_bytes(content.encode(encoding)[:-1])
    with pytest.raises(ValueError, match=r"long.txt: not a text in UTF-8"):
        found_in(tmp_path / "long.txt")


def test_answers_and_models_are_left_out_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = ("settings.json", "measured.csv", "measured.txt")
    left_out = [Path("measured", "other.txt"), Path("earlier", "store.jsonl"), Path("model", "deep", "merges.txt")]
    left_out += [Path("earlier", "m-1k", name) for name in answer]
    left_out += [Path("model", name) for name in ("config.json", "tokenizer.json")]
    texts = [Path("a.txt"), Path("store.jsonl"), Path("earlier", "b.txt"), Path("settings", "settings.json")]
    texts.append(Path("settings", "config.json"))
    for number, path in enumerate((*texts, *left_out)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{number:09d}\n" * 100)

    def numbers(name: str, *options: str) -> set[int]:
        (text,) = read_texts(parsed("m", name, "--length", "100", "--documents", "99", *options), byte_tokenizer())
        lines = "".join(map(byte_tokenizer().decode, text.sequences)).split("\n")
        return {int(line) for line in lines if len(line) == 9 and line.isdigit()}

    with caplog.at_level(logging.INFO):
        assert numbers(".") == {*range(len(texts))}
    assert ".: left out, as answers of this command or models: measured, model, earlier/m-1k" in caplog.text
    assert numbers("earlier/m-1k") == {texts_before + len(texts) for texts_before in (3, 4, 5)}, "named, it is a text"
    assert numbers(".", "--out", ".") == {0, 2, 3, 4, 5}, "a store lies in --out, where nothing else is left out"
    with pytest.raises(ValueError, match="measured: no text"):
        Path("measured", "other.txt").rename("measured/store.jsonl")
        numbers("measured")


def test_a_text_is_read_once_under_a_name_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("files", "notes", "other/notes", "wiki", LATIN, "two\nlines", 'a "b", 50 %'):
        Path(name).mkdir(parents=True)
        Path(name, "1.txt").write_text(words(len(name), 2000))
    Path("alias").symlink_to("notes")
    Path("letter.txt").write_text(words(9, 2000))

    def names(*given: str) -> list[str]:
        return [text.name for text in found_in(*given)]

    assert names("notes", "notes/", "./notes", str(tmp_path / "notes"), "alias", "other/../notes") == ["notes"]
    assert names("notes", "other/notes/") == ["notes", "other/notes"]
    assert names("files", "letter.txt", "./letter.txt") == ["files", "files (2)"]
    assert names("./wiki", 'a "b", 50 %') == ["./wiki", 'a "b", 50 %']
    assert names(LATIN, "two\nlines") == ["\\xfcbung", "two\\nlines"]
    monkeypatch.chdir(tmp_path / "other" / "notes")
    assert names(".") == ["notes"] and names("..") == ["other"] and names("../../notes") == ["../../notes"]
    assert len(found_in("1.txt", "./1.txt", documents=40)[0].sequences) == 2002 // 160
    with pytest.raises(ValueError, match="empty name; write . for the current folder"):
        found_in("")


def test_a_user_without_a_home_needs_a_folder_only_for_the_assets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user whom the system does not know
    assert parsed("m", "a.txt").model == "m"
    assert parsed("--assets", "here").assets == Path("here")
    for given in (["m", "wiki"], []):
        with pytest.raises(ValueError, match="no home folder .*; name a folder with --assets"):
            parsed(*given)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert parsed().assets == tmp_path / "residual-mass" / "assets"


def test_names_of_files_are_utf_8() -> None:
    for name in ("--out", "--assets", "--phi"):
        with pytest.raises(ValueError, match=rf"{name} a/\\xfcbung: this name is not UTF-8; rename it"):
            parsed("m", "a.txt", name, f"a/{LATIN}")
    assert parsed("a/b/").name == "b"
