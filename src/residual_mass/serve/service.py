"""What answers requests: a model, its prompts, the thread that generates."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from residual_mass.serve.answers import Answers, Question
from residual_mass.serve.calls import declares_parts
from residual_mass.serve.prompts import Prompts
from residual_mass.serve.protocol import Bad, ChatRequest, CompletionRequest, Sampled
from residual_mass.serve.sampling import Grammars, Sampling
from residual_mass.serve.tokens import TokenBytes
from residual_mass.serve.worker import Worker


@dataclass
class Service:
    """Everything that requests are answered with.

    Attributes:
        name: of the model, for clients.
        served_by: what generates, for the header of answers.
    """

    answers: Answers
    prompts: Prompts
    worker: Worker
    name: str
    served_by: str
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.vocabulary = self.prompts.vocabulary
        self.grammars = Grammars(self.answers.tokenizer, self.vocabulary, self.answers.ends)
        self.bytes = TokenBytes(self.answers.tokenizer)

    def require_model(self, name: str | None) -> None:
        if name is not None and name != self.name:
            raise Bad(f"model: this server has {self.name} and no other, such as {name!r}", "model", 404)

    def has_parts(self, request: ChatRequest) -> bool:
        """Returns whether an answer can have reasoning and calls of tools beside its text."""
        form = request.response_format
        return declares_parts(self.answers.tokenizer) and (form is None or form.type == "text")

    def questions(self, request: Sampled, prompts: list[list[int]], special: bool = False) -> list[Question]:
        """Returns a question for each answer that is asked for; raises Bad for what cannot be asked.

        Args:
            special: whether the text of answers has special tokens.
        """
        if request.stream_options is not None and not request.stream:
            raise Bad("stream_options: they are for streams; leave them out", "stream_options")
        if getattr(request, "top_logprobs", None) is not None and not request.logprobs:
            raise Bad("top_logprobs: it needs logprobs=true", "top_logprobs")
        grammar = self.grammars.of(getattr(request, "response_format", None))
        joined = isinstance(request, CompletionRequest)
        stops = request.stop or []
        ends = self._special(stops)
        questions = []
        for ids in prompts:
            for number in range(request.n or 1):
                own = None if grammar is None else grammar.copy()
                sampling = Sampling(request, self.answers.model.generation_config, self.vocabulary, own)
                limit = self.prompts.room(ids, request.limit)
                kept = request.cache_prompt is not False
                question = Question(
                    ids, limit, stops, sampling, number, request.top, kept, special, joined=joined, ends=ends
                )
                questions.append(question)
        return questions

    def _special(self, stops: list[str]) -> frozenset[int]:
        """Returns the special tokens among stop strings, which the text of an answer does not show."""
        special = set(self.answers.tokenizer.all_special_ids)
        ids = self.answers.tokenizer.get_added_vocab()
        return frozenset(ids[stop] for stop in stops if ids.get(stop) in special)
