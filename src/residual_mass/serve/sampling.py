"""What chooses the next token: transformers' processors of logits, a generator for each answer, and grammars.

Shape letters: L = tokens so far, V = vocabulary.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from residual_mass.serve.protocol import Bad, ResponseFormat, Sampled

PENALTIES = (1e-30, 1e30)
"""Bounds of a repetition penalty, which may be any number above 0: products with others are beyond float32."""
LONGEST_ID = 20
"""Characters of a token's id."""
COLDEST = 1e-6
"""Lowest temperature above 0: quotients by lower ones are beyond float32."""
SAMPLES = ("temperature", "top_p", "top_k", "min_p")
"""Fields that sample."""


class Sampling:
    """Settings by which the tokens of one answer are chosen.

    Args:
        defaults: of the model.
        grammar: that an answer has to follow; None for any text.
    """

    def __init__(self, request: Sampled, defaults: GenerationConfig, vocabulary: int, grammar: Any = None) -> None:
        self.request = request
        self.grammar = grammar
        self.biases = biases_of(request, vocabulary)
        settings = {name: getattr(request, name) for name in SAMPLES}
        asked = any(value is not None for value in settings.values())
        self.samples = settings["temperature"] != 0 if asked else bool(defaults.do_sample)
        # Without do_sample, the others may be transformers' defaults, such as top_k = 50, that nobody chose.
        if defaults.do_sample:
            own = {name: getattr(defaults, name, None) for name in SAMPLES}
            settings = {name: own[name] if value is None else value for name, value in settings.items()}
        penalty = request.repetition_penalty or defaults.repetition_penalty
        self.processors = LogitsProcessorList()
        if penalty not in (None, 1):
            self.processors.append(
                RepetitionPenaltyLogitsProcessor(min(max(float(penalty), PENALTIES[0]), PENALTIES[1]))
            )
        self.warpers = warpers_of(settings) if self.samples else LogitsProcessorList()

    def generator(self, number: int) -> torch.Generator:
        """Returns the source of random numbers of an answer, by its number among those to one prompt."""
        generator = torch.Generator()
        if self.request.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.request.seed + number)  # the answers to one prompt differ
        return generator

    def choose(self, ids: Tensor, answer: Tensor, logits: Tensor, generator: torch.Generator) -> int:
        """Returns the next token.

        Args:
            ids: [1, L], the text so far.
            answer: [n], its generated tokens.
            logits: [1, V] float32.
        """
        # A copy: reported logarithms are those of the logits before any of this.
        scores = self.processors(ids, logits.clone())
        frequency = self.request.frequency_penalty or 0.0
        presence = self.request.presence_penalty or 0.0
        if len(answer) and (frequency or presence):
            # OpenAI's rule for token j with count c_j > 0: logit_j -= c_j frequency + presence.
            tokens, counts = answer.unique(return_counts=True)
            scores[0, tokens] -= frequency * counts + presence
        if self.biases is not None:
            tokens, numbers = self.biases
            scores[0, tokens] += numbers
        if self.grammar is not None:
            self.grammar.mask(scores)
        if not self.samples:
            return int(scores.argmax(-1))
        # With 0 as maximum, quotients by a low temperature overflow to -inf alone; softmax stays the same.
        scores = self.warpers(ids, scores - scores.max())
        return int(torch.multinomial(scores.softmax(-1), 1, generator=generator))


def warpers_of(settings: dict[str, Any]) -> LogitsProcessorList:
    """Returns what changes the distribution that is sampled from, in transformers' order."""
    warpers = LogitsProcessorList()
    if settings["temperature"] not in (None, 1):
        warpers.append(TemperatureLogitsWarper(max(float(settings["temperature"]), COLDEST)))
    if settings["top_k"] is not None and settings["top_k"] > 0:
        warpers.append(TopKLogitsWarper(settings["top_k"]))
    if settings["top_p"] is not None and settings["top_p"] < 1:
        warpers.append(TopPLogitsWarper(float(settings["top_p"])))
    if settings["min_p"]:
        warpers.append(MinPLogitsWarper(float(settings["min_p"])))
    return warpers


def biases_of(request: Sampled, vocabulary: int) -> tuple[Tensor, Tensor] | None:
    """Returns the tokens with a bias, and the biases; raises Bad for an id that the model does not know."""
    if not request.logit_bias:
        return None
    tokens = []
    for name in request.logit_bias:
        # The length comes before int(), which raises an error of its own for thousands of digits.
        if not name.isdecimal() or len(name) > LONGEST_ID or int(name) >= vocabulary:
            raise Bad(f"logit_bias: {name[:LONGEST_ID]!r} is no token id below {vocabulary}", "logit_bias")
        tokens.append(int(name))
    return torch.tensor(tokens), torch.tensor(list(request.logit_bias.values()))


class Grammars:
    """Makes grammars of JSON for a model's tokens.

    Args:
        ends: tokens that end an answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, ends: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary
        self.ends = ends
        self._tokens: Any = None

    def of(self, format: ResponseFormat | None) -> Grammar | None:
        """Returns the grammar of a response format, None for texts.

        Raises:
            Bad: the schema cannot be followed, or the package that does so is not installed.
        """
        if format is None or format.type == "text":
            return None
        schema: dict[str, Any] = {"type": "object"}
        if format.type == "json_schema":
            if format.json_schema is None:
                raise Bad("response_format.json_schema: the schema is missing", "response_format")
            schema = format.json_schema.schema_
        try:
            import llguidance
            import llguidance.hf
        except ImportError:
            raise Bad("response_format: the server lacks the package llguidance", "response_format") from None
        # Made once for all grammars: it goes through the whole vocabulary.
        if self._tokens is None:
            try:
                ends = sorted(self.ends) or None
                self._tokens = llguidance.hf.from_tokenizer(self.tokenizer, n_vocab=self.vocabulary, eos_token=ends)
            except (ValueError, AssertionError, TypeError) as error:
                raise Bad(f"response_format: not for this tokenizer ({error})", "response_format") from None
        try:
            written = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
            matcher = llguidance.LLMatcher(self._tokens, written)
        except ValueError as error:
            raise Bad(f"response_format: {' '.join(str(error).split())}", "response_format") from None
        # Some mistakes of a schema are kept in the matcher and not raised.
        if matcher.is_error():
            raise Bad(f"response_format: {' '.join(matcher.get_error().split())}", "response_format")
        return Grammar(matcher, self.vocabulary)


class Grammar:
    """The grammar of one answer, and how far the answer has followed it."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        import llguidance.torch

        self.matcher = matcher
        self.bits = llguidance.torch.allocate_token_bitmask(1, vocabulary)

    def copy(self) -> Grammar:
        """Returns the grammar of another answer."""
        other = Grammar.__new__(Grammar)
        other.matcher = self.matcher.deep_copy()
        other.bits = self.bits.clone()
        return other

    def mask(self, scores: Tensor) -> None:
        """Sets the scores [1, V] of tokens that cannot follow to -inf."""
        import llguidance.torch

        llguidance.torch.fill_next_token_bitmask(self.matcher, self.bits, 0)
        llguidance.torch.apply_token_bitmask_inplace(scores, self.bits)

    def follow(self, token: int) -> bool:
        """Takes the answer's next token; returns whether the answer is complete."""
        self.matcher.consume_token(token)
        return bool(self.matcher.is_stopped())
