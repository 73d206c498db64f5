"""Speculative decoding with one model: partial attention drafts, full attention verifies.

A pass drafts n tokens by partial steps, reads the newest token and the drafts at once by full attention, keeps the
drafts up to the first that full attention does not give, and adds a token of full attention's own (Leviathan et al.
2023, "Fast inference from transformers via speculative decoding", algorithm 1). The drafts' keys and values come from
approximate hidden states, so they are taken out of the cache before the verifying pass writes those of full attention.

Shape letters: L = tokens so far, n = drafts, V = vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput, LogitsProcessorList, StoppingCriteriaList

from residual_mass.kernels.cache import BLOCK
from residual_mass.model.packed import PackedCache, PackedSession
from residual_mass.model.partial import PartialSession

MOST = BLOCK - 1
"""Drafts of a pass: with the newest token, a block of a packed cache."""
READ = {"attention_mask", "past_key_values", "use_cache", "cache_position", "position_ids", "logits_to_keep"}
"""What `generate` passes on that says no more than the tokens and the cache do, for one prompt without padding."""


class Pass(NamedTuple):
    """What one verifying pass did: tokens drafted, how many of them are part of the text, and the seconds of both."""

    drafted: int
    accepted: int
    drafting: float
    verifying: float


def require_verify(verify: int | Literal["auto"]) -> None:
    """Raises ValueError for a number of drafts that is not served."""
    if verify != "auto" and (isinstance(verify, bool) or not isinstance(verify, int) or not 1 <= verify <= MOST):
        raise ValueError(
            f'verify is {verify!r}, not "auto" or a number of drafts from 1 to {MOST}: a longer draft does not fit '
            f"the window of {BLOCK} tokens that is verified at once"
        )


def accepted_or_drawn(p: Tensor, q: Tensor, drafted: Tensor) -> tuple[Tensor, bool]:
    """Accepts a token drawn from q with probability min(1, p / q), and otherwise draws one from the normalised positive
    part of p - q, so that the token returned is distributed as p.

    Args:
        p, q: probabilities [V] of full attention and of the draft.
        drafted: [1].

    Returns:
        The token [1], and whether it is the drafted one by acceptance.
    """
    wanted, had = float(p[drafted]), float(q[drafted])
    if wanted >= had or (wanted > 0 and float(torch.rand((), dtype=torch.float64)) * had < wanted):
        return drafted, True
    rest = (p - q).clamp_min(0)
    return drawn(rest if bool(rest.any()) else p), False  # nothing is left where p and q differ by roundings alone


def drawn(p: Tensor) -> Tensor:
    """Draws a token [1] from probabilities, or weights, [V]; the likeliest where only one is possible."""
    return p.argmax(-1, keepdim=True) if int(p.count_nonzero()) == 1 else torch.multinomial(p, 1)


@dataclass
class Pace:
    """How many tokens to draft: as many as are given, or those that promise the most tokens a second.

    Drafts are taken to be right independently, with the share of those looked at that were; a verifying pass takes a
    constant and an amount per token, by least squares. Passes count less with every later one.
    """

    verify: int | Literal["auto"]
    passes: int = 0
    right: float = 1
    looked_at: float = 1.5
    draft: tuple[float, float] = (0, 0)
    """Number and seconds of draft steps."""
    moments: list[float] = field(default_factory=lambda: [0.0] * 5)
    """Sums of 1, n, n^2, seconds and n seconds over verifying passes with n drafts."""
    KEPT = 0.95
    TRIED = (2, 6)
    AGAIN = 32
    """Passes after which drafts are tried again where none promise more than full attention."""

    def drafts(self) -> int:
        if self.verify != "auto":
            return self.verify
        if self.passes < len(self.TRIED):
            return self.TRIED[self.passes]
        best = max(range(MOST + 1), key=self.speed)
        return best or (self.TRIED[0] if self.passes % self.AGAIN == 0 else 0)

    def speed(self, n: int) -> float:
        """Expected tokens a second of passes with n drafts."""
        share, (steps, seconds), (count, x, xx, y, xy) = self.right / self.looked_at, self.draft, self.moments
        spread = xx - x * x / count
        slope = max(0.0, (xy - x * y / count) / spread) if spread > 1e-6 * count else 0.0
        verifying = max(y / count + slope * (n - x / count), 1e-9)
        return sum(share**i for i in range(n + 1)) / (n * seconds / max(steps, 1e-9) + verifying)

    def saw(self, done: Pass) -> None:
        """Counts a pass; of the first the time of drafts does not count, as the method prepares itself in it."""
        self.passes += 1
        if self.passes != 2:  # the second replaces the first
            self.draft = self.KEPT * self.draft[0], self.KEPT * self.draft[1]
        else:
            self.draft = 0, 0
        self.draft = self.draft[0] + done.drafted, self.draft[1] + done.drafting
        self.right = self.KEPT * self.right + done.accepted
        self.looked_at = self.KEPT * self.looked_at + min(done.accepted + 1, done.drafted)
        n, seconds = done.drafted, done.verifying
        new = (1, n, n * n, seconds, n * seconds)
        self.moments = [self.KEPT * before + now for before, now in zip(self.moments, new, strict=True)]


@dataclass
class Verified:
    """One generation, within the session's attention hook.

    Attributes:
        cache: what holds all tokens but the newest, with full attention's keys and values, between passes.
        passes: gets what each pass did.
    """

    model: PreTrainedModel
    session: PartialSession | PackedSession
    cache: Cache
    pace: Pace
    passes: list[Pass]
    config: GenerationConfig
    processor: LogitsProcessorList
    criteria: StoppingCriteriaList
    scores: tuple[Tensor, ...] = ()
    logits: tuple[Tensor, ...] = ()

    def generate(self, ids: Tensor) -> Tensor | GenerateDecoderOnlyOutput:
        """Continues the text [1, L], of which the cache holds the beginning, as `generate` returns it."""
        with self._session_is("reading"):
            for piece in ids[:, self.cache.get_seq_length() :].split(self.config.prefill_chunk_size or ids.shape[1], 1):
                logits = self._read(piece, logits_to_keep=1)
        ids, _, done = self._taken(ids, logits, [], [])
        ends = self._ends()
        while not done:
            length, limit = ids.shape[1] - 1, self.criteria.max_length
            count = self.pace.drafts()
            if limit is not None:
                count = min(count, limit - ids.shape[1] - 1)
            if isinstance(self.cache, PackedCache):
                self.cache.reserve(count + 1)
            text, expected, started = ids, [], time.perf_counter()
            while len(expected) < count and not (expected and int(text[0, -1]) in ends):
                p, _ = self._distribution(text, self._read(text[:, -1:])[-1:])
                expected.append(p)
                text = torch.cat((text, drawn(p)[None]), 1)
            drafted, drafts = time.perf_counter(), list(text[0, length + 1 :, None])
            self._crop(len(drafts))
            with self._session_is("verifying"):
                logits = self._read(text[:, length:])
            ids, right, done = self._taken(ids, logits, drafts, expected)
            self._crop(self.cache.get_seq_length() - (ids.shape[1] - 1))
            self.passes.append(Pass(len(drafts), right, drafted - started, time.perf_counter() - drafted))
            self.pace.saw(self.passes[-1])
        if not self.config.return_dict_in_generate:
            return ids
        return GenerateDecoderOnlyOutput(
            sequences=ids, scores=self.scores if self.config.output_scores else None,
            logits=self.logits if self.config.output_logits else None, past_key_values=self.cache,
        )  # fmt: skip

    def _taken(
        self, ids: Tensor, logits: Tensor, drafts: list[Tensor], expected: list[Tensor]
    ) -> tuple[Tensor, int, bool]:
        """The text with what full attention's logits [n + 1, V] accept of the drafts and the token after it, the number
        of drafts accepted, and whether the text has ended.
        """
        right, done = 0, False
        for at in range(len(drafts) + 1):
            p, scores = self._distribution(ids, logits[at : at + 1])
            if at < len(drafts):
                token, accepted = accepted_or_drawn(p, expected[at], drafts[at])
            else:
                token, accepted = drawn(p), False
            ids, right = torch.cat((ids, token[None]), 1), right + accepted
            if self.config.return_dict_in_generate:
                self.scores += (scores,) if self.config.output_scores else ()
                self.logits += (logits[at : at + 1].float(),) if self.config.output_logits else ()
            done = bool(self.criteria(ids, self.scores or None).all())
            if done or not accepted:
                break
        return ids, right, done

    def _distribution(self, ids: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities [V] of the next token after the text, from logits [1, V], and the processed scores [1, V]."""
        scores = self.processor(ids, logits.to(torch.float32, copy=True))
        if self.config.do_sample:
            return scores[0].softmax(-1), scores
        return torch.zeros_like(scores[0]).index_fill_(0, scores[0].argmax(-1), 1), scores

    def _read(self, tokens: Tensor, **options: Any) -> Tensor:
        """Logits after tokens [1, T], which follow those of the cache: [T, V]."""
        return self.model(tokens, past_key_values=self.cache, use_cache=True, return_dict=True, **options).logits[0]

    def _crop(self, count: int) -> None:
        if count:
            self.cache.crop(-count)

    def _ends(self) -> set[int]:
        ends = self.config.eos_token_id
        return set() if ends is None else {ends} if isinstance(ends, int) else set(ends)

    @contextmanager
    def _session_is(self, what: Literal["reading", "verifying"]) -> Iterator[None]:
        setattr(self.session, what, True)
        try:
            yield
        finally:
            setattr(self.session, what, False)


def require_one_plain_prompt(ids: Tensor, cache: Cache, options: dict[str, Any], config: GenerationConfig) -> None:
    """Raises ValueError for what a verified generation does not serve."""
    if len(ids) != 1:
        raise ValueError(f"verify takes one prompt, not {len(ids)} (num_return_sequences counts): generate one by one")
    mask = options.get("attention_mask")
    if mask is not None and (mask.shape != ids.shape or not bool(mask.all())):
        raise ValueError("verify takes a prompt without padding, of which input_ids hold the whole text of all turns")
    if config.output_attentions or config.output_hidden_states:
        raise ValueError("verify keeps no attentions or hidden states: unset output_attentions, output_hidden_states")
    if more := sorted(name for name, value in options.items() if name not in READ and value is not None):
        raise ValueError(f"verify reads token ids alone: leave out {', '.join(more)}")
    if cache.get_seq_length() >= ids.shape[1]:
        raise ValueError(
            f"the cache holds {cache.get_seq_length()} tokens, and input_ids {ids.shape[1]}: pass the whole text of "
            "all turns, with something new"
        )
