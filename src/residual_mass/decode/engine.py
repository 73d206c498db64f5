"""Shared-prefill decoding: all arms of an evaluation decode greedily from one exact prefill, as one batch.

All arms share the prefix's keys, values and summaries, which are read-only; each arm has its own buffer of generated
keys and values, so no arm can contaminate another. The first generated token comes from the shared exact prefill.
Finished examples and arms leave the batch.

Shape letters: E = examples, N = rows (example, arm), T = new tokens, L = prefix columns, V = vocabulary.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from residual_mass.decode.arms import ArmsBackend, FullRows, Layers, PartialRows
from residual_mass.decode.backend import Prefill
from residual_mass.decode.backends import terms_on
from residual_mass.decode.prefix import Map, PrefixLayer, Summary, build_prefix, summarise_prefix
from residual_mass.decode.recording import prefill
from residual_mass.decode.supported import require_served
from residual_mass.decode.terms import retrieved_by
from residual_mass.decode.text import Text
from residual_mass.model.finite import end_tokens, greedy, model_at_fault
from residual_mass.model.loading import Backbone
from residual_mass.model.phi_maps import MAPS_AT_FAULT, PhiMaps
from residual_mass.model.rotary import frequencies_of
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.settings import AnchorSpec

Finish = Literal["length", "eos", "saturated"]
LayerSummaries = tuple[list[Map], list[Summary]]
"""phi_q and the summaries of prefixes, both by layer."""
Summaries = Mapping[str | None, LayerSummaries]
"""Those of all maps by their label."""
Saturated = Callable[[int, list[int]], bool]
"""Whether the tokens generated for the prompt with an index determine its score, with any further tokens."""


@dataclass(frozen=True)
class Generation:
    """Output of one arm for one prompt."""

    tokens: list[int]
    """Generated ids, including an end-of-sequence token."""
    k: int
    """Mid-region tokens retrieved per query head and step (all of them for `full`)."""
    finish: Finish


@dataclass
class Work:
    """Total tokens and seconds of an engine, for rates and estimates."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_rows: int = 0
    """Decoded tokens, over all examples and arms."""
    decode_seconds: float = 0.0


class NotFiniteError(ValueError):
    """A NaN or an infinity in the computation of a prompt's text."""

    def __init__(self, prompt: int, what: str, cause: str) -> None:
        super().__init__(f"{what} not finite; {cause}")
        self.prompt = prompt
        """Index among the prompts of the call."""


class SharedPrefillEngine:
    """Decodes prompts under several arms at once.

    Args:
        backbone: the frozen model.
        arms: arms to run; results keep their order.
        anchors: sink and tail tokens that are always exact.
        phi: maps of this backbone by the label that arms name, or one set of maps for arms without a label.
        nominal_length: L in the budget formula; None uses each prompt's own length.

    Attributes:
        work: tokens and seconds of all calls.

    Raises:
        ValueError: an arm's maps are missing, or belong to another backbone; `require_served` refuses the model.
    """

    def __init__(
        self,
        backbone: Backbone,
        arms: Sequence[ArmSpec],
        anchors: AnchorSpec,
        phi: PhiMaps | Mapping[str, PhiMaps] | None,
        nominal_length: int | None,
    ) -> None:
        self.backbone = backbone
        self.arms = list(arms)
        self.anchors = anchors
        self.nominal_length = nominal_length
        self.work = Work()
        require_served(backbone.model)
        self.frequencies = frequencies_of(backbone.model)
        given: Mapping[str | None, PhiMaps] = {}
        if isinstance(phi, Mapping):
            given = phi
        elif phi is not None:
            given = {None: phi}
        users = {arm.maps: arm for arm in arms if arm.needs_maps}
        self.maps = {}
        for label, arm in users.items():
            self.maps[label] = self._checked(given, label, arm).folded()

    def _checked(self, phi: Mapping[str | None, PhiMaps], label: str | None, arm: ArmSpec) -> PhiMaps:
        if label not in phi:
            raise ValueError(f"method {arm.method} needs phi maps{'' if label is None else f' {label}'}")
        maps = phi[label]
        spec = self.backbone.spec
        maps.require(self.backbone.shape, spec.model_id, spec.revision)
        return maps.on(self.backbone.model)

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[list[int]], max_new_tokens: int | Sequence[int], saturated: Saturated | None = None
    ) -> list[list[Generation]]:
        """Generates with all arms, indexed [example][arm]: prefills prompts one by one, then decodes all rows as one
        batch.

        Args:
            max_new_tokens: one limit, or one per prompt.
            saturated: stops an arm once its score is determined; without it, arms run to a limit or an end token.

        Raises:
            ValueError: the model's rotary frequencies change within the prompts' texts, or differ between them.
            NotFiniteError: the model or the maps return a NaN or an infinity.
        """
        model = self.backbone.model
        lengths = [len(ids) for ids in prompts]
        if isinstance(max_new_tokens, int):
            max_new_tokens = [max_new_tokens] * len(prompts)
        limits = list(max_new_tokens)
        self.require_constant_frequencies(prompts, limits)
        started = time.monotonic()
        layers, first = self.read(prompts)
        read_seconds = time.monotonic() - started
        started = time.monotonic()
        room = max(limits) - 1  # the first token comes from the prefill
        decoder = self.decoder(layers, lengths, self.arms, room, self.summaries(layers))
        batch = RowBatch(first, limits, len(self.arms), end_tokens(model), saturated)
        self.decode(decoder, batch, lengths)
        # Not earlier: an attempt that runs out of memory must not count.
        self.work.prefill_tokens += sum(lengths)
        self.work.prefill_seconds += read_seconds
        self.work.decode_rows += batch.num_tokens()
        self.work.decode_seconds += time.monotonic() - started
        return [self._generations(batch, e, length) for e, length in enumerate(lengths)]

    def require_constant_frequencies(self, prompts: Sequence[list[int]], limits: Sequence[int]) -> None:
        """Raises ValueError if rotary frequencies change within the texts of a batch, or differ between them."""
        # The last generated token is never read.
        self.frequencies.require_growing([len(ids) for ids in prompts], [limit - 1 for limit in limits])

    def _generations(self, batch: RowBatch, e: int, length: int) -> list[Generation]:
        """Returns the output of every arm for an example with a prompt of `length` tokens."""
        generations = []
        for arm, tokens, finish in zip(self.arms, batch.tokens[e], batch.finish[e], strict=True):
            k = retrieved_by(arm, length, self.anchors, self.nominal_length)
            generations.append(Generation(tokens, k, finish))
        return generations

    def read(self, prompts: Sequence[list[int]]) -> tuple[list[PrefixLayer], list[int]]:
        """Prefills prompts one by one; returns each layer's prefix, padded on the right, and the next tokens.

        Raises:
            NotFiniteError: the model returns a NaN or an infinity.
        """
        states = []
        for prompt, ids in enumerate(prompts):
            state = prefill(self.backbone.model, [ids])
            if not state.finite:  # a key or value that is not finite nearly always shows in the logits
                raise self._prefill_not_finite(prompt, state)
            states.append(state)
        device = self.backbone.device
        lengths = torch.tensor([len(ids) for ids in prompts], device=device)
        longest = max(map(len, prompts))
        real = torch.arange(longest, device=device) < lengths[:, None]  # [E, L]
        layers = []
        for index in range(self.backbone.shape.layers):
            keys = _in_one_batch([state.layers[index][0] for state in states], longest)
            values = _in_one_batch([state.layers[index][1] for state in states], longest)
            layers.append(build_prefix(keys, values, real, self.anchors, gapless=True))
        return layers, [int(state.next_token) for state in states]

    def _prefill_not_finite(self, prompt: int, state: Prefill) -> NotFiniteError:
        """Builds the error for a prefill with logits that are not finite."""
        what = "the logits after it are"
        for index, (keys, values) in sorted(state.layers.items()):
            if not (keys.isfinite().all() and values.isfinite().all()):
                what = f"the keys or values of layer {index} are"
                break
        return NotFiniteError(prompt, what, model_at_fault(self.backbone.spec))

    def decoder(
        self,
        layers: Sequence[PrefixLayer],
        lengths: Sequence[int],
        arms: Sequence[ArmSpec],
        room: int,
        summaries: Summaries,
        max_arms: int | None = None,
        dense: Layers | None = None,
    ) -> ArmsBackend:
        """Builds the attention handler of some arms after prefixes.

        Args:
            room: tokens that an arm can generate.
            max_arms: most arms of one method that are computed together; None for any number of arms that share maps.
            dense: as in `PartialRows`.
        """
        whole = [a for a, arm in enumerate(arms) if arm.is_full]
        parts: list[FullRows | PartialRows] = []
        if whole:
            parts.append(FullRows(whole, layers, lengths, room))
        terms = terms_on(self.backbone.device)
        anchors = self.anchors
        nominal_length = self.nominal_length
        for label, places in _groups_of_arms(arms, next(iter(summaries), None), max_arms):
            own_arms = [arms[a] for a in places]
            maps = summaries[label] if any(arm.needs_maps for arm in own_arms) else None
            rows = PartialRows(places, own_arms, layers, lengths, anchors, nominal_length, maps, dense, terms=terms)
            parts.append(rows)
        return ArmsBackend(arms, parts, layers)

    def summaries(self, layers: Sequence[PrefixLayer]) -> Summaries:
        """Summarises prefixes under all maps.

        Raises:
            NotFiniteError: a summary is not finite.
        """
        summaries = {}
        for label, maps in self.maps.items():
            by_layer = []
            for layer, (_, key_map) in zip(layers, maps, strict=True):
                by_layer.append(summarise_prefix(layer, key_map))
            self._require_finite(by_layer, layers, label)
            summaries[label] = [query_map for query_map, _ in maps], by_layer
        return summaries

    def _require_finite(self, summaries: Sequence[Summary], layers: Sequence[PrefixLayer], label: str | None) -> None:
        """Raises NotFiniteError unless the summaries of all layers are finite."""
        by_layer = []
        for summary in summaries:
            parts = [part.flatten(1).isfinite().all(1) for part in summary.state]
            by_layer.append(torch.stack(parts))  # [parts of the state, E]
        finite = torch.stack(by_layer).all(1).cpu()  # [layers, E], with a single synchronisation
        if finite.all():
            return
        index, prompt = (~finite).nonzero()[0].tolist()
        keys = layers[index].keys[prompt]
        values = layers[index].values[prompt]
        if not (keys.isfinite().all() and values.isfinite().all()):
            what = f"the keys or values of layer {index} are"
            raise NotFiniteError(prompt, what, model_at_fault(self.backbone.spec))
        raise NotFiniteError(prompt, f"the summary of layer {index}{maps_suffix(label)} is", MAPS_AT_FAULT)

    def decode(self, arms: ArmsBackend, batch: RowBatch, lengths: Sequence[int]) -> None:
        """Decodes until every row of `batch` is finished, dropping finished examples and arms from `arms`."""
        text = self.text(arms, lengths)
        steps = 0
        while batch.shrink(text):
            newest = [batch.tokens[e][a][-1:] for e, a in batch.rows()]
            logits = text.step(torch.tensor(newest, device=self.backbone.device))
            # One transfer for both: a second synchronisation would take as long as the first.
            tokens, finite = torch.stack(greedy(logits)).tolist()
            for (e, a), good in zip(batch.rows(), finite, strict=True):
                if not good and batch.finish[e][a] is None:  # tokens of finished rows are not used
                    # `arms.arms` holds only the arms that still decode, in the order of `batch.arms`.
                    arm = arms.arms[batch.arms.index(a)]
                    # Token 1 is the prefill's, so step 0 gives token 2.
                    raise self.not_finite(e, f"generated token {steps + 2}", arm)
            batch.add(tokens)
            steps += 1

    def text(self, arms: ArmsBackend, lengths: Sequence[int]) -> Text:
        """Returns the rows (example, arm) after prefixes of so many tokens."""
        columns = torch.arange(arms.tokens, device=self.backbone.device)
        real = columns < torch.tensor(lengths, device=columns.device)[:, None]  # [E, L], padding on the right
        return Text(self.backbone.model, arms, real.repeat_interleave(len(arms.arms), 0))  # rows by example, then arm

    def not_finite(self, prompt: int, of: str, arm: ArmSpec, place: str = "") -> NotFiniteError:
        """Builds the error for logits under an arm that are not finite."""
        under = f"{arm.method}{maps_suffix(arm.maps)}"
        cause = MAPS_AT_FAULT if arm.needs_maps else model_at_fault(self.backbone.spec)
        return NotFiniteError(prompt, f"the logits of {of} under {under}{place} are", cause)


def _in_one_batch(tensors: Sequence[Tensor], longest: int) -> Tensor:
    """Joins keys or values [1, Hkv, L_e, D] of prompts, with zeros after the shorter ones: [E, Hkv, longest, D]."""
    padded = []
    for x in tensors:
        missing = longest - x.shape[2]
        padded.append(F.pad(x, (0, 0, 0, missing)))
    return torch.cat(padded)


def _groups_of_arms(
    arms: Sequence[ArmSpec], first: str | None, max_arms: int | None
) -> Iterator[tuple[str | None, list[int]]]:
    """Yields groups of partial arms that share maps, as the maps' label and the arms' indices.

    Args:
        first: label of the first maps; arms that need none join theirs.
        max_arms: most arms of a group, which then are of one method; None for any number.
    """
    groups = defaultdict(list)
    for a, arm in enumerate(arms):
        if not arm.is_full:
            label = arm.maps if arm.needs_maps else first
            method = "" if max_arms is None else arm.method
            groups[label, method].append(a)
    for (label, _), places in groups.items():
        size = max_arms or len(places)
        for start in range(0, len(places), size):
            yield label, places[start : start + size]


class RowBatch:
    """The rows (example, arm) of one call: their tokens, why they finished, and the examples and arms still decoding.

    A finished row keeps decoding, with its tokens ignored, while its example and its arm both have unfinished rows.
    """

    def __init__(
        self, first: list[int], limits: list[int], num_arms: int, ends: frozenset[int], saturated: Saturated | None
    ) -> None:
        self.limits = limits
        self.ends = ends
        self.saturated = saturated
        self.examples = list(range(len(first)))
        self.arms = list(range(num_arms))
        self.tokens: list[list[list[int]]] = []
        self.finish: list[list[Finish | None]] = []
        for _ in self.examples:
            self.tokens.append([[] for _ in self.arms])
            self.finish.append([None] * num_arms)
        self.add([token for token in first for _ in self.arms])

    def rows(self) -> list[tuple[int, int]]:
        """Returns the decoding rows (example, arm), by example, then arm."""
        return [(e, a) for e in self.examples for a in self.arms]

    def num_tokens(self) -> int:
        """Returns the number of tokens of all rows, those that no longer decode included."""
        return sum(len(tokens) for by_arm in self.tokens for tokens in by_arm)

    def add(self, tokens: list[int]) -> None:
        """Adds a token to each unfinished row; `tokens` has one for each of `rows`."""
        for (e, a), token in zip(self.rows(), tokens, strict=True):
            if self.finish[e][a] is None:
                own = self.tokens[e][a]
                own.append(token)
                self.finish[e][a] = self._finish(e, own)

    def _finish(self, e: int, tokens: list[int]) -> Finish | None:
        # First, because an end token at the limit still ends the text by itself.
        if tokens[-1] in self.ends:
            return "eos"
        if len(tokens) >= self.limits[e]:
            return "length"
        return "saturated" if self.saturated is not None and self.saturated(e, tokens) else None

    def shrink(self, text: Text) -> bool:
        """Drops finished examples and arms from a text; returns False when all rows are finished."""
        unfinished = []
        for e, a in self.rows():
            if self.finish[e][a] is None:
                unfinished.append((e, a))
        if not unfinished:
            return False
        examples = sorted({e for e, _ in unfinished})
        arms = sorted({a for _, a in unfinished})
        if examples != self.examples or arms != self.arms:
            # The backend and `real` hold only what still decodes: they take places in it, not numbers of the call.
            places = [self.examples.index(e) for e in examples]
            arm_places = [self.arms.index(a) for a in arms]
            text.real = text.real[[e * len(self.arms) + a for e in places for a in arm_places]]
            text.backend.keep(places, arm_places)
            self.examples = examples
            self.arms = arms
        return True


def maps_suffix(label: str | None) -> str:
    return "" if label is None else f" with the maps {label}"
