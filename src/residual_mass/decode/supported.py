"""Why a model is not served: what its configuration and classes say, and what one short call shows."""

from __future__ import annotations

import weakref

import torch
from transformers import PreTrainedModel

from residual_mass.decode.backends import require_maps
from residual_mass.decode.recording import Recording
from residual_mass.decode.text import Text
from residual_mass.methods.arms import Arm
from residual_mass.model.layers import (
    attention_layers,
    device_of,
    require_attention_alone,
    require_keys_of_its_own,
    text_config,
)
from residual_mass.model.phi_maps import HeadShape, PhiMaps

_called: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()
"""Models whose call has shown nothing against them."""


def require_served(model: PreTrainedModel, arm: Arm | None = None, phi: PhiMaps | None = None) -> None:
    """Raises ValueError, in one line, if no method works on a model, or an arm's maps are not its own. Whatever works
    with models asks here first.

    Args:
        arm: which generates; None for several methods over one prompt, where a pass must need no more of earlier tokens
            than keys and values.
    """
    attention_layers(model)
    if arm is None:
        require_attention_alone(model)
        HeadShape.of(text_config(model))
    else:
        require_keys_of_its_own(model)
        require_maps(arm, phi)
        if arm.needs_maps:
            phi.require(HeadShape.of(text_config(model)))
    if model not in _called:
        _require_plain_calls(model)
        _called.add(model)


@torch.no_grad()
def _require_plain_calls(model: PreTrainedModel) -> None:
    """Raises ValueError unless a model can be called with two token ids, and attends once in every layer.

    Only a call shows layers that attend several times, bypass the attention function, or ask it for more than a softmax
    of scores.
    """
    ids = torch.tensor([[0, 1]], device=device_of(model))
    try:
        Text(model, Recording(lambda call: None)).read(ids)
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, KeyError, RuntimeError, TypeError) as error:
        first, *_ = str(error).strip().splitlines() or [""]
        name = type(model).__name__
        raise ValueError(f"{name} cannot be called with token ids alone ({type(error).__name__}: {first})") from error
