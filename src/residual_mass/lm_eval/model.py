"""The model `partial_kv` of lm-evaluation-harness, and how it scores given tokens.

Shape letters: T = scored tokens, V = vocabulary.
"""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from residual_mass.decode.backends import backend_for, require_maps
from residual_mass.decode.engine import NotFiniteError
from residual_mass.decode.generate import partial_kv
from residual_mass.decode.supported import require_served
from residual_mass.decode.text import Text
from residual_mass.decode.torch_backend import TorchBackend
from residual_mass.methods import method_named
from residual_mass.methods.arms import Arm, arm_of
from residual_mass.model.layers import device_of
from residual_mass.model.loading import gguf_model, load_tokenizer
from residual_mass.model.packed_weights import pack_weights
from residual_mass.model.phi_maps import PhiMaps
from residual_mass.model.rotary import frequencies_of
from residual_mass.spec.settings import AnchorSpec
from residual_mass.texts.hub import gguf_file

UNSUPPORTED = ("parallelize", "tp_plan", "peft", "autogptq", "gptqmodel", "mixed_precision_dtype")
"""Options of HFLM that distribute, wrap or compute attention in ways that were not tested."""
BESIDE_GGUF = (
    "tokenizer", "dtype", "device", "backend", "truncation", "logits_cache", "max_length", "softmax_dtype",
    "batch_size", "max_batch_size", "add_bos_token", "prefix_token_id", "think_end_token", "enable_thinking",
    "chat_template_args", "trust_remote_code",
)  # fmt: skip
"""Options of HFLM that count beside a GGUF file, or that the command line also sets for data sets; it would ignore
others.
"""
OF_TOKENIZER = ("revision", "subfolder", "use_fast_tokenizer")
"""Options that count beside a GGUF file only if the name of a tokenizer is given, which HFLM then loads."""

Texts = tuple[str, str]
TokenRequest = tuple[Texts | None, list[int], list[int]]
"""What HFLM scores: the texts (None for a window of a rolling likelihood), tokens of the context, tokens to score."""


class BadArgument(ValueError):
    """An argument of the model is wrong."""


@register_model("partial_kv")
class PartialKV(HFLM):
    """HFLM with a method of residual_mass in place of full attention.

    * `generate_until` reads prompts exactly and generates with `model.generate` inside `partial_kv`: batches, stop
      sequences, truncation and chat templates are HFLM's.
    * `loglikelihood` reads the context exactly except for its last token. From there on every token attends through the
      method, so that all tokens of the continuation are predicted under it. (In generation the first new token is
      still that of full attention.) Requests with the same context share its prefill.
    * `loglikelihood_rolling` scores HFLM's windows in chunks of `stride` tokens: a chunk attends through the method to
      all earlier tokens of the window, which are read exactly, and exactly to itself. Under `full` this is HFLM's
      value. Under another method it is the likelihood of the text if a new prompt began every `stride` tokens. The
      first chunk of a window is exact, because no tokens precede it: a text shorter than `stride` has the value of full
      attention.

    Likelihoods are computed one context at a time; `batch_size` applies to generation.

    Args:
        pretrained: as in HFLM, a name, a folder or a loaded model; or a GGUF file, whose weights keep its codes. Its
            tokenizer is the file's, unless `tokenizer` is given, and its dtype float32, unless `dtype` is.
        method: a name in `residual_mass.methods`.
        budget: exact-support budget as a share of the prompt, anchors included, in (0, 1]; not for full and caches.
        phi: feature maps or their file, for the methods that need them.
        num_sink, num_tail: first and last positions of the prompt that are always exact.
        stride: tokens of a chunk in rolling likelihoods.
        weights: 4 or 8 packs the weights of linear layers (`pack_weights`), on a CPU; None leaves the model as it is.
        options: HFLM's, except for those in UNSUPPORTED and encoder-decoder models.

    Raises:
        BadArgument: an unknown method, a number out of range, maps missing or of another shape, a model or an option
            that is not supported.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        *,
        method: str = "topk_moments",
        budget: float | str | None = 0.02,
        phi: str | Path | PhiMaps | None = None,
        num_sink: int = 4,
        num_tail: int = 16,
        stride: int = 256,
        weights: int | None = None,
        **options: Any,
    ) -> None:
        _require_supported(options)
        try:
            arm = arm_of(method, budget if method_named(method).chooses else None)
            self.budget = None if arm.budget_percent is None else arm.budget_percent / 100
            self.arm = arm
            _require_whole("num_sink", num_sink, 0)
            _require_whole("num_tail", num_tail, 0)
            _require_whole("stride", stride, 1)
            self.anchors = AnchorSpec(num_sink, num_tail)
            self.stride = stride
            self.phi = PhiMaps.load(phi) if isinstance(phi, str | Path) else phi
            require_maps(arm, self.phi)
        except ValueError as error:
            raise BadArgument(str(error)) from None
        if isinstance(pretrained, str) and pretrained.endswith(".gguf"):
            pretrained, options["tokenizer"] = _from_gguf(pretrained, options, packed=weights is None)
        super().__init__(pretrained, **options)
        if self.backend != "causal":
            raise BadArgument(f"{type(self.model).__name__} is not a decoder-only model; no other is supported")
        self.weights = weights
        try:
            require_served(self.model, arm, self.phi)
            if weights is not None:
                pack_weights(self.model, weights)
        except ValueError as error:
            raise BadArgument(str(error)) from None

    @property
    def _arguments(self) -> tuple[str, float | None, PhiMaps | None, int, int]:
        """Arguments of `partial_kv` after the model."""
        return self.arm.rule.name, self.budget, self.phi, self.anchors.sink, self.anchors.tail

    def _text(self) -> Text:
        """Returns an empty text under the method, by the backend that serves it here."""
        phi = self.phi if self.arm.needs_maps else None
        return Text(self.model, backend_for(self.model, self.arm, self.anchors, phi))

    def get_model_info(self) -> dict[str, Any]:
        """Returns HFLM's facts with those that identify the method in the results."""
        phi_sha256 = None if self.phi is None else self.phi.sha256
        facts = {"method": self.arm.rule.name, "budget": self.budget, "phi_sha256": phi_sha256}
        facts |= {"num_sink": self.anchors.sink, "num_tail": self.anchors.tail}
        facts |= {"stride": self.stride, "weights": self.weights}
        return {**super().get_model_info(), "partial_kv": facts}

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any) -> Tensor:
        try:
            with partial_kv(self.model, *self._arguments):
                return super()._model_generate(context, max_length, stop, **generation_kwargs)
        except ValueError as error:
            raise BadArgument(str(error)) from None

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: Sequence[TokenRequest], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Scores requests as HFLM does, in their order; `override_bs` is ignored.

        Raises:
            BadArgument: the model's rotary frequencies change within a request.
            ValueError: a request has no context, no continuation, or one that is longer than the model's limit.
            NotFiniteError: a key, a value or a logit is not finite.
        """
        scored = [Scored.of(request, place, self.max_length) for place, request in enumerate(requests)]
        scored.sort(key=Scored.order)
        for item in scored:
            self._require_constant_frequencies(item)
        answers: dict[int, tuple[float, bool]] = {}
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running loglikelihood requests") as bar:
            for (rolling, prefix), group in itertools.groupby(scored, key=attrgetter("rolling", "prefix")):
                items = list(group)
                with_logits = self._windows(items) if rolling else self._continuations(prefix, items)
                for item, logits in with_logits:
                    answer = self._answer(logits, item.targets)
                    answers[item.place] = answer
                    if not rolling:  # HFLM caches rolling likelihoods, as sums over windows
                        texts, *_ = requests[item.place]
                        self.cache_hook.add_partial("loglikelihood", texts, answer)
                    bar.update(1)
        return [answers[place] for place in range(len(requests))]

    def _require_constant_frequencies(self, item: Scored) -> None:
        """Raises BadArgument if the frequencies of a request's exact beginning are not those of all that follows."""
        read = len(item.prefix)
        end = read + len(item.forced)
        ends = range(read, end, self.stride) if item.rolling else [read]
        try:
            frequencies_of(self.model).require([*(length for length in ends if length), end])
        except ValueError as error:
            raise BadArgument(str(error)) from None

    def _continuations(
        self, prefix: Sequence[int], scored: Iterable[Scored]
    ) -> Iterator[tuple[Scored, Iterable[Tensor]]]:
        """Yields continuations of one prefix, which is read once, with the logits [T, V] after each token. Those that
        differ only in their last token share logits.
        """
        text = self._text()
        if prefix:
            text.read(self._ids(prefix))
        for tokens, group in itertools.groupby(scored, key=attrgetter("forced")):
            logits = self._logits(text, tokens)
            for item in group:
                yield item, [logits]

    def _windows(self, scored: Iterable[Scored]) -> Iterator[tuple[Scored, Iterable[Tensor]]]:
        """Yields windows with the logits [T, V] after their tokens, `stride` at a time."""
        for item in scored:
            tokens = [*item.prefix, *item.forced]
            yield item, self._chunks(tokens, len(item.prefix))

    def _chunks(self, tokens: list[int], start: int) -> Iterator[Tensor]:
        """Yields the logits of each chunk, given all tokens before it."""
        text = self._text()
        if start:
            text.read(self._ids(tokens[:start]))
        for first in range(start, len(tokens), self.stride):
            chunk = tokens[first : first + self.stride]
            yield self._logits(text, chunk)
            if first + self.stride < len(tokens):
                text.read(self._ids(chunk))

    def _logits(self, text: Text, tokens: Sequence[int]) -> Tensor:
        """Returns logits [T, V] after each token; without a text before them all tokens are read exactly.

        Raises:
            NotFiniteError: a logit is not finite.
        """
        if text.tokens == 0:
            text = Text(self.model, backend_for(self.model, Arm(method_named("full"), None), kinds=[TorchBackend]))
        else:
            text = text.copy()
        logits = text.step(self._ids(tokens))[0]
        if not logits.isfinite().all():
            raise NotFiniteError(0, f"the logits under {self.arm.rule.name} are", "weights are damaged, or overflow")
        return logits

    def _ids(self, tokens: Sequence[int]) -> Tensor:
        """Returns tokens as [1, T] on the model's device."""
        return torch.tensor([list(tokens)], device=device_of(self.model))

    def _answer(self, logits: Iterable[Tensor], targets: Sequence[int]) -> tuple[float, bool]:
        """Returns the sum of the targets' log-probabilities, and whether each of them is the likeliest token.

        Args:
            logits: [T, V] of each chunk, in the order of the targets.
        """
        total = 0.0
        greedy = True
        done = 0
        for chunk in logits:
            log_probs = F.log_softmax(chunk, dim=-1, dtype=self.softmax_dtype)
            tokens = torch.tensor(targets[done : done + len(chunk)], device=chunk.device)
            of_targets = log_probs.gather(-1, tokens.unsqueeze(-1))
            total += float(of_targets.sum())
            is_greedy = log_probs.argmax(-1) == tokens
            greedy = greedy and bool(is_greedy.all())
            done += len(chunk)
        return total, greedy


class Scored(NamedTuple):
    """A request, cut as HFLM cuts it. `prefix` is read exactly. `forced` are the tokens after which `targets` are
    scored. `rolling` marks a window of a rolling likelihood.
    """

    place: int
    rolling: bool
    prefix: tuple[int, ...]
    forced: tuple[int, ...]
    targets: tuple[int, ...]

    @classmethod
    def of(cls, request: TokenRequest, place: int, max_length: int) -> Scored:
        """Cuts tokens on the left where a request is longer than the model can take."""
        texts, context, continuation = request
        if not context or not 0 < len(continuation) <= max_length:
            sizes = f"a continuation of {len(continuation)} tokens after {len(context)}"
            raise ValueError(f"{sizes} cannot be scored: the model takes {max_length}")
        # The last token is a target alone: nothing is read after it.
        tokens = tuple(context + continuation)[-(max_length + 1) :]
        start = len(tokens) - len(continuation) - 1
        return cls(
            place=place,
            rolling=texts is None,
            prefix=tokens[:start],
            forced=tokens[start:-1],
            targets=tuple(continuation),
        )

    def order(self) -> tuple[Any, ...]:
        """Returns what requests are sorted by: those of one prefix together, and the longest, which needs the most
        memory, first.
        """
        return self.rolling, -len(self.prefix), self.prefix, self.forced


def _require_supported(options: Mapping[str, Any]) -> None:
    unsupported = [name for name in UNSUPPORTED if options.get(name)]
    if unsupported:
        raise BadArgument(f"partial_kv does not support {', '.join(unsupported)}: leave {unsupported[0]} out")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise BadArgument("partial_kv runs in one process: start it without accelerate launch and torchrun")


def _from_gguf(
    name: str, options: Mapping[str, Any], packed: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | str]:
    """Loads the model of a GGUF file, and its tokenizer unless options have one, which is returned as it is.

    Raises:
        BadArgument: the file cannot be loaded, or an option would be ignored.
    """
    tokenizer = options.get("tokenizer")
    _require_used(options, has_name=isinstance(tokenizer, str))
    device = options.get("device")
    if device is not None and not str(device).startswith("cpu"):
        raise BadArgument(f"a GGUF file runs on a CPU, not on {device}: leave device out")
    dtype = _dtype_of(options.get("dtype"))
    try:
        tokenizer = tokenizer or load_tokenizer(name, "", "gguf", Path())
        return gguf_model(gguf_file(name), dtype, packed), tokenizer
    except ValueError as error:
        raise BadArgument(str(error)) from None


def _require_used(options: Mapping[str, Any], has_name: bool) -> None:
    """Raises BadArgument if an option, at another value than HFLM's default, would be ignored beside a GGUF file."""
    used = (*BESIDE_GGUF, *OF_TOKENIZER) if has_name else BESIDE_GGUF
    defaults = inspect.signature(HFLM.__init__).parameters
    ignored = []
    for name, value in options.items():
        is_default = name in defaults and value == defaults[name].default
        if name not in used and value is not None and not is_default:
            ignored.append(name)
    if ignored:
        raise BadArgument(f"{', '.join(ignored)} would be ignored beside a GGUF file: leave {ignored[0]} out")


def _dtype_of(dtype: str | torch.dtype | None) -> torch.dtype:
    """Returns in what the model of a GGUF file computes: float32 by default."""
    if dtype in (None, "auto"):
        return torch.float32
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if found not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise BadArgument(f"dtype is {dtype!r}: write float32, bfloat16, float16 or float64")
    return found


def _require_whole(name: str, value: int, minimum: int) -> None:
    if not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name} is {value!r}, not a whole number of at least {minimum}")
