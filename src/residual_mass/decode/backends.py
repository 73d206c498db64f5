"""Which backend serves a method on a model: the first that does not refuse.

What the method alone decides is in `methods.served`, without torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
import transformers
from transformers import Cache, PreTrainedModel

from residual_mass.core.accounting import Terms
from residual_mass.decode.backend import Backend
from residual_mass.decode.packed_backend import PackedBackend, PackedCache
from residual_mass.decode.terms import prefix_terms
from residual_mass.decode.told import tell_once
from residual_mass.decode.torch_backend import TorchBackend, with_room
from residual_mass.gpu.backend import TritonBackend
from residual_mass.gpu.device import kernels_run_on
from residual_mass.methods.arms import Arm
from residual_mass.methods.served import backends_of
from residual_mass.model.layers import attention_layers, text_config
from residual_mass.model.phi_maps import PhiMaps
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.settings import AnchorSpec

log = logging.getLogger(__name__)
BACKENDS: tuple[type[Backend], ...] = (PackedBackend, TritonBackend, TorchBackend)
"""In the order in which they are asked."""


def backend_for(
    model: PreTrainedModel,
    arm: Arm | ArmSpec,
    anchors: AnchorSpec,
    phi: PhiMaps | None = None,
    cache: Cache | None = None,
    crop: bool = False,
    room: int = 0,
    kinds: Sequence[type[Backend]] = BACKENDS,
) -> Backend:
    """Returns the backend of an arm on a model: that of the given cache, or the first that serves.

    Says once for a model and reason where torch serves what kernels serve elsewhere.

    Args:
        cache: of earlier turns; or an empty one, which the torch backend fills and others replace by their own.
        crop: whether the backend must be able to remove tokens.
        room: most tokens that will follow the prompt, for backends with buffers of fixed size.
        kinds: backends to ask.

    Raises:
        ValueError: `cache` holds tokens and is for another method, or tokens cannot be removed from it; no backend
            among `kinds` serves.
    """
    if isinstance(cache, PackedCache):
        packed = PackedBackend(model, arm, anchors, cache)
        if crop and cache.packing.bits != 4:
            raise ValueError(f"a PackedCache of {cache.packing.bits} bits is read whole: there is nothing to verify")
        return _with_crop(packed, crop)
    if cache is not None and cache.get_seq_length() > 0:
        _tell_torch(model, arm, f"the cache that it goes on from is a {type(cache).__name__}")
        return _with_crop(TorchBackend(model, arm, anchors, phi, with_room(cache)), crop)
    reasons = []
    for kind in kinds:
        reason = kind.refusal(model, arm, phi)
        if reason is None and crop and not kind.crops(model, arm):
            reason = "tokens cannot be removed"
        if reason is None:
            if kind is TorchBackend:
                _tell_torch(model, arm, "; ".join(reasons))
            return kind.open(model, arm, anchors, phi, cache, crop, room)
        reasons.append(f"{kind.name}: {reason}")
    raise ValueError(f"no backend serves {arm.rule.name}: {'; '.join(reasons)}")


def _tell_torch(model: PreTrainedModel, arm: Arm | ArmSpec, reason: str) -> None:
    """Says once that torch serves an arm, if kernels serve its method elsewhere and there is a reason."""
    if reason and len(backends_of(arm.rule)) > 1:
        tell_once(model, log, f"torch serves {arm.rule.name} on {type(model).__name__}, no kernels: {reason}")


def _with_crop(backend: Backend, crop: bool) -> Backend:
    if crop and not backend.can_crop:
        raise ValueError(
            f"verify cannot remove tokens from a {type(backend.cache).__name__} with windows or fixed sizes: pass "
            "past_key_values=DynamicCache() from the first turn on"
        )
    return backend


def terms_on(device: torch.device) -> Callable[..., Terms]:
    """Returns what computes the terms of a prefix under several arms on a device: `prefix_terms`, or kernels."""
    if not kernels_run_on(device):
        return prefix_terms
    from residual_mass.gpu.terms import PrefixTerms

    return PrefixTerms()


def loop_refusal(model: PreTrainedModel) -> str | None:
    """Returns why a model cannot be called without its own cache, in one line; None if it can.

    Models that need more of earlier tokens than their keys and values in every layer run under `partial_kv`.
    """
    name = type(model).__name__
    config = text_config(model)
    if getattr(model, "_is_stateful", False) or len(attention_layers(model)) != config.num_hidden_layers:
        return f"{name} has layers with states other than keys and values"
    if getattr(config, "num_kv_shared_layers", 0) and transformers.__version__.startswith("4."):
        return f"{name} shares keys between layers through its cache in transformers {transformers.__version__}"
    if model.config is not config:
        return f"{name} takes positions of images and text from its own forward pass"
    return None
