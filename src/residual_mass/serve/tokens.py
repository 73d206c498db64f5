"""The bytes of single tokens."""

from __future__ import annotations

import functools
import re

from transformers import PreTrainedTokenizerBase

BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""A token of one byte, in vocabularies of SentencePiece."""


class TokenBytes(dict[int, bytes]):
    """The bytes that tokens add to a text, with the blank before a word; they may be parts of characters."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.before = tokenizer("a", add_special_tokens=False).input_ids
        self.begun = tokenizer.decode(self.before)

    def __missing__(self, token: int) -> bytes:
        self[token] = self._found(token)
        return self[token]

    def _found(self, token: int) -> bytes:
        # Decoded behind another one: alone, a token may lose the blank before its word.
        text = self.tokenizer.decode([*self.before, token])
        text = text[len(self.begun) :] if text.startswith(self.begun) else self.tokenizer.decode([token])
        if "\ufffd" not in text:
            return text.encode()
        # U+FFFD stands for bytes that are no whole character, which the name of the token has.
        name = self.tokenizer.convert_ids_to_tokens(token)
        if (byte := BYTE.fullmatch(name)) is not None:
            return bytes([int(byte[1], 16)])
        if all(character in byte_of_character() for character in name):
            return bytes(byte_of_character()[character] for character in name)
        return text.encode()


@functools.cache
def byte_of_character() -> dict[str, int]:
    """Returns the bytes that characters stand for in the vocabularies of byte-level BPE: printable ones for themselves,
    those from 256 on for the others in their order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
