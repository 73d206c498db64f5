"""Which backend serves a method on a model: the first that does not refuse.

What the method alone decides is in `methods.served`, without torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from residual_mass.core.accounting import Terms
from residual_mass.decode.backend import CacheBackend
from residual_mass.decode.packed_backend import PackedBackend, PackedCache, PackedLayer
from residual_mass.decode.terms import prefix_terms
from residual_mass.decode.told import tell_once
from residual_mass.decode.torch_backend import TorchBackend, with_room
from residual_mass.gpu.backend import TritonBackend
from residual_mass.gpu.device import kernels_run_on
from residual_mass.methods.arms import Arm
from residual_mass.methods.served import backends_of
from residual_mass.model.layers import attention_layers, text_config, window_of
from residual_mass.model.phi_maps import PhiMaps
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.settings import AnchorSpec

log = logging.getLogger(__name__)
BACKENDS: tuple[type[CacheBackend], ...] = (PackedBackend, TritonBackend, TorchBackend)
"""In the order in which they are asked."""
ANCHORS = AnchorSpec()


def backend_for(
    model: PreTrainedModel,
    arm: Arm | ArmSpec,
    anchors: AnchorSpec = ANCHORS,
    phi: PhiMaps | None = None,
    cache: Cache | None = None,
    room: int = 0,
    kinds: Sequence[type[CacheBackend]] = BACKENDS,
) -> CacheBackend:
    """Returns the backend of an arm on a model: that of the given cache, or the first that serves.

    Says once for a model and reason where torch serves what kernels serve elsewhere.

    Args:
        cache: of earlier turns; or an empty one, which the torch backend fills and others replace by their own.
        room: most tokens that will follow the prompt, for backends with buffers of fixed size.
        kinds: backends to ask.

    Raises:
        ValueError: `cache` holds tokens and is for another method, or was left within a call; no backend among `kinds`
            serves.
    """
    if cache is not None:
        require_one_length(model, cache)
    if isinstance(cache, PackedCache):
        return PackedBackend(model, arm, anchors, cache)
    if cache is not None and cache.get_seq_length() > 0:
        _tell_torch(model, arm, f"the cache that it goes on from is a {type(cache).__name__}")
        return TorchBackend(model, arm, anchors, phi, with_room(cache))
    reasons = []
    for kind in kinds:
        reason = kind.refusal(model, arm, phi)
        if reason is None:
            if kind is TorchBackend:
                _tell_torch(model, arm, "; ".join(reasons))
            return kind.open(model, arm, anchors, phi, cache, room)
        reasons.append(f"{kind.name}: {reason}")
    raise ValueError(f"no backend serves {arm.rule.name}: {'; '.join(reasons)}")


def require_one_length(model: PreTrainedModel, cache: Cache) -> None:
    """Raises ValueError if layers that read the whole text hold different numbers of tokens, as after a call that was
    interrupted.
    """
    if getattr(text_config(model), "num_kv_shared_layers", 0):
        return  # layers that share keys hold none
    indices = [layer.layer_idx for layer in attention_layers(model) if window_of(layer) is None]
    held = [cache.layers[index] for index in indices if index < len(cache.layers)]
    lengths = {layer.get_seq_length() for layer in held if isinstance(layer, (PackedLayer, DynamicLayer))}
    if len(lengths) > 1:
        raise ValueError(
            f"layers of the {type(cache).__name__} hold {min(lengths)} to {max(lengths)} tokens, because a call of the "
            "model was interrupted: read the text again into a new cache"
        )


def _tell_torch(model: PreTrainedModel, arm: Arm | ArmSpec, reason: str) -> None:
    """Says once that torch serves an arm, if kernels serve its method elsewhere and there is a reason."""
    if reason and not arm.is_full and len(backends_of(arm.rule)) > 1:
        tell_once(model, log, f"torch serves {arm.rule.name} on {type(model).__name__}, no kernels: {reason}")


def terms_on(device: torch.device) -> Callable[..., Terms]:
    """Returns what computes the terms of a prefix under several arms on a device: `prefix_terms`, or kernels."""
    if not kernels_run_on(device):
        return prefix_terms
    from residual_mass.gpu.terms import PrefixTerms

    return PrefixTerms()


def require_maps(arm: Arm, phi: PhiMaps | None) -> None:
    """Raises ValueError if a method lacks its maps, or if maps are given to a method with another residual."""
    if phi is not None and arm.rule.own is not None:
        raise ValueError(f"method {arm.rule.name} uses no phi maps: leave phi out")
    if phi is None and arm.needs_maps:
        raise ValueError(f"method {arm.rule.name} needs phi maps: pass phi=PhiMaps.load(...)")
