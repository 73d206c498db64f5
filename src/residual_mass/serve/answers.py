"""Answers to prompts, token by token: the served model under its method, over kept beginnings.

Shape letters: L = tokens so far, T = tokens of a piece, V = vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from residual_mass.decode.backends import backend_for
from residual_mass.decode.compiled import step_for
from residual_mass.decode.packed_backend import PackedBackend
from residual_mass.decode.text import Text
from residual_mass.decode.torch_backend import TorchBackend
from residual_mass.methods import method_named
from residual_mass.methods.arms import Arm
from residual_mass.model.rotary import frequencies_of
from residual_mass.serve.kept import STRIDE, Kept, KeptText
from residual_mass.serve.sampling import Sampling
from residual_mass.spec.settings import AnchorSpec

log = logging.getLogger(__name__)

BEHIND = 8
"""Last tokens of a prompt that say how a tokenizer joins the first one of a completion."""


@dataclass(frozen=True)
class LogProb:
    """The logarithm of a token's probability, with the likeliest tokens in its place and theirs."""

    token: int
    value: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Piece:
    """A further piece of an answer.

    Attributes:
        text: may be empty while a character or a stop string is not complete.
        finish: why the answer ends with it.
    """

    text: str
    logprobs: tuple[LogProb, ...] = ()
    finish: Literal["stop", "length"] | None = None


@dataclass
class Question:
    """One answer to be generated.

    Attributes:
        ids: the prompt.
        limit: most new tokens.
        number: of the answer among those to the same prompt.
        top: likeliest tokens to report; None without logarithms.
        keep: whether kept beginnings are used, and the text is kept.
        special: whether the answer's text has special tokens, but for the one that ends it.
        joined: whether the answer's text goes on in that of the prompt, as a completion does.
        ends: further tokens that end it.
        cached: tokens of the prompt that were not read anew, known once the answer begins.
        generated: number of new tokens so far.
    """

    ids: list[int]
    limit: int
    stops: list[str]
    sampling: Sampling
    number: int = 0
    top: int | None = None
    keep: bool = True
    special: bool = False
    joined: bool = False
    ends: frozenset[int] = frozenset()
    cached: int = 0
    generated: int = 0


class Left(Exception):
    """The client has left."""


@dataclass
class Answers:
    """A model that answers questions, one after the other.

    Attributes:
        ends: tokens that end an answer.
        compile: whether steps are compiled.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    arm: Arm
    kept: Kept
    ends: frozenset[int]
    compile: bool = False
    anchors: AnchorSpec = field(default_factory=AnchorSpec)

    def __post_init__(self) -> None:
        self.turn = frequencies_of(self.model).limit
        """Tokens beyond which a text has other rotary frequencies from its beginning on."""

    @torch.no_grad()
    def pieces(self, question: Question, left: Callable[[], bool]) -> Iterator[Piece]:
        """Yields the pieces of an answer.

        Args:
            left: whether the client has left; asked between pieces of the prompt and between tokens.

        Raises:
            Left: the client has left.
        """
        started = time.perf_counter()
        ids = torch.tensor([question.ids])
        beginning = (
            self.kept.take(ids[0], self._shortest(ids.shape[1]))
            if question.keep
            else KeptText(ids[0, :0], self.kept.make())
        )
        question.cached = len(beginning.ids)
        backend = PackedBackend(self.model, self.arm, self.anchors, beginning.cache)
        text = Text(self.model, backend, None, step_for(self.model, self.compile, 1, question.limit, alone=True))
        gone = ""
        whole = False  # an error within a step may leave layers with different numbers of tokens
        try:
            logits = self._read(text, beginning, ids, left)
            yield from self._continued(text, beginning, question, ids, logits, left)
            whole = True
        except (Left, GeneratorExit):
            gone = ", and the client left"
            whole = True
            raise
        finally:
            if question.keep and whole:
                # Of a prompt without an answer the last piece may be short: what goes on from there would be read in
                # other pieces.
                self.kept.put(beginning if question.generated else beginning.at_last_mark())
            log.info(
                "prompt of %d tokens (%d kept), %d new in %.1f s%s",
                len(question.ids), question.cached, question.generated, time.perf_counter() - started, gone,
            )  # fmt: skip

    def _read(self, text: Text, beginning: KeptText, ids: Tensor, left: Callable[[], bool]) -> Tensor:
        """Reads a prompt [1, L] to its end, in pieces that end at every STRIDE tokens; marks the text there."""
        while text.tokens < ids.shape[1]:
            if left():
                raise Left
            logits = text.read(ids[:, text.tokens : self._end_of_piece(text.tokens, ids.shape[1])])
            beginning.ids = ids[0, : text.tokens]
            if text.tokens % STRIDE == 0:
                beginning.mark()
        return logits

    def _shortest(self, tokens: int) -> int:
        """Returns the tokens that the first piece of a prompt has to exceed."""
        return int(self.turn) if tokens > self.turn else 0

    def _end_of_piece(self, start: int, tokens: int) -> int:
        """Returns where a piece of a prompt of so many tokens ends that begins at `start`."""
        within = max(start, self._shortest(tokens))
        return min((within // STRIDE + 1) * STRIDE, tokens)

    def _continued(
        self, text: Text, beginning: KeptText, question: Question, ids: Tensor, logits: Tensor, left: Callable[[], bool]
    ) -> Iterator[Piece]:
        sampling = question.sampling
        grammar = sampling.grammar
        generator = sampling.generator(question.number)
        ends = self.ends | question.ends
        behind = question.ids[-BEHIND:] if question.joined else []
        writer = Writer(self.tokenizer, question.stops, question.special, behind)
        while True:
            if left():
                raise Left
            raw = logits[:, -1].float()
            if not raw.max().isfinite():
                name = type(self.model).__name__
                raise ValueError(f"{name}'s logits are not finite: its weights are damaged, or overflow in this dtype")
            token = sampling.choose(ids, ids[0, len(question.ids) :], raw, generator)
            question.generated += 1
            logprob = () if question.top is None else (log_prob(raw[0], token, question.top),)
            ids = torch.cat((ids, torch.tensor([[token]])), 1)
            ended = token in ends or (grammar is not None and grammar.follow(token))
            piece = "" if token in ends else writer.add(token)
            if ended or writer.stopped:
                yield Piece(piece + writer.rest(), logprob, "stop")
                return
            if question.generated >= question.limit:
                yield Piece(piece + writer.rest(), logprob, "length")
                return
            yield Piece(piece, logprob)
            logits = text.step(ids[:, -1:])
            # Not marked: what shares a part of the answer alone is read, as it would be if nothing were kept.
            beginning.ids = ids[0, : text.tokens]

    @torch.no_grad()
    def prompt_logprobs(self, ids: list[int], top: int, left: Callable[[], bool]) -> Iterator[LogProb]:
        """Yields the logarithms of a prompt's tokens, under full attention, by which prompts are read.

        Raises:
            Left: the client has left.
        """
        full = Arm(method_named("full"), None)
        text = Text(self.model, backend_for(self.model, full, kinds=[TorchBackend]))
        yield LogProb(ids[0], None)
        whole = torch.tensor([ids])
        while text.tokens < len(ids) - 1:
            if left():
                raise Left
            start = text.tokens
            end = self._end_of_piece(start, len(ids) - 1)
            logits = text.step(whole[:, start:end])[0]
            for row, token in zip(logits.float(), ids[start + 1 : end + 1], strict=True):
                yield log_prob(row, token, top)


def log_prob(logits: Tensor, token: int, top: int) -> LogProb:
    """Returns the logarithm of a token's probability by logits [V], and those of the likeliest tokens."""
    values = logits.log_softmax(-1)
    best = values.topk(top)
    likeliest = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return LogProb(token, float(values[token]), likeliest)


class Writer:
    """Turns tokens into text as soon as it is certain: characters are whole, and no stop string has begun.

    Args:
        special: whether special tokens are part of the text.
        behind: tokens before the text, if it goes on in theirs.

    Attributes:
        stopped: whether a stop string has come; it and what follows is no part of the text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stops: list[str],
        special: bool = False,
        behind: Sequence[int] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.special = special
        self.stops = stops
        self.stopped = False
        self.ids = list(behind)
        self._shown = len(self.ids)
        """Tokens before those whose text is not complete."""
        self._before = 0
        """Tokens from which on a tokenizer joins the next one as in the whole text."""
        self._held = ""
        """Text that may be the beginning of a stop string."""

    def add(self, token: int) -> str:
        """Adds a token; returns the text that is certain by now."""
        self.ids.append(token)
        # Decoded behind earlier tokens: alone, a token may lose the blank before its word.
        before = self._decoded(self._before, self._shown)
        now = self._decoded(self._before, len(self.ids))
        # U+FFFD stands for bytes of a character that later tokens complete.
        if now.endswith("\ufffd") or len(now) <= len(before):
            return ""
        self._before = self._shown
        self._shown = len(self.ids)
        return self._certain(now[len(before) :])

    def rest(self) -> str:
        """Returns what is left at the end of an answer."""
        if self.stopped:
            return ""
        before = self._decoded(self._before, self._shown)
        now = self._decoded(self._before, len(self.ids))
        certain = self._certain(now[len(before) :])
        held = self._held
        self._held = ""
        return certain if self.stopped else certain + held

    def _certain(self, text: str) -> str:
        held = self._held + text
        places = [held.find(stop) for stop in self.stops if stop in held]
        if places:
            self.stopped = True
            return held[: min(places)]
        begun = max((overlap(held, stop) for stop in self.stops), default=0)
        self._held = held[len(held) - begun :]
        return held[: len(held) - begun]

    def _decoded(self, start: int, end: int) -> str:
        return self.tokenizer.decode(self.ids[start:end], skip_special_tokens=not self.special)


def overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of a text that is a beginning of a stop string."""
    # `_certain` has looked for whole stop strings before.
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def answer_of(pieces: Iterator[Piece]) -> tuple[str, list[LogProb], Any]:
    """Returns a whole answer: its text, logarithms, and why it ended."""
    text = []
    logprobs: list[LogProb] = []
    finish = None
    for piece in pieces:
        text.append(piece.text)
        logprobs += piece.logprobs
        finish = piece.finish
    return "".join(text), logprobs, finish
