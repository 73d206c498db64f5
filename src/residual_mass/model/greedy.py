"""`partial_generate`: greedy generation from one prompt on the fast path."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from residual_mass.core.settings import AnchorSpec
from residual_mass.methods import Method
from residual_mass.model.hook import device_of, require_plain
from residual_mass.model.partial import make_arm, require_maps
from residual_mass.model.phi_maps import PhiMaps
from residual_mass.model.prefill import end_tokens, prefill
from residual_mass.model.prefix import retrieved_by
from residual_mass.model.static_decode import StaticDecoder, fill_buffers, fused_method


@torch.no_grad()
def partial_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    method: str | Method = "topk_phi",
    budget: float | None = 0.01,
    phi: PhiMaps | None = None,
    num_sink: int = 4,
    num_tail: int = 16,
    eos_token_id: int | list[int] | None = None,
) -> Tensor:
    """Generates greedily, as `model.generate` within `partial_kv`, but from static buffers and, on a GPU, with fused
    kernels.

    Args:
        input_ids: [1, L], one prompt without padding.
        method, budget, phi, num_sink, num_tail: as for `partial_kv`; the methods are those of the paper, and those that
            choose by all keys' scores, exact or of 4 bits, alone or with truncated moments.
        eos_token_id: token or tokens that end the text; None takes those of the model's generation config, an empty
            list none.

    Returns:
        The prompt and up to `max_new_tokens` new tokens, the last of which may be an end token: [1, L + T].

    Raises:
        ValueError: as for `partial_kv`; no fast step for the method; several prompts or none of token ids;
            max_new_tokens below 1; a model without a language-model head.
    """
    if not isinstance(input_ids, Tensor):
        raise ValueError(
            f"partial_generate takes token ids [1, L], not a {type(input_ids).__name__}: pass "
            'tokenizer(text, return_tensors="pt").input_ids'
        )
    if input_ids.ndim != 2 or len(input_ids) != 1:
        raise ValueError(f"partial_generate takes one prompt [1, L], not {list(input_ids.shape)}; use partial_kv")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}, not above 0")
    arm, anchors = make_arm(method, budget), AnchorSpec(num_sink, num_tail)
    rule = fused_method(arm.rule)
    require_plain(model)
    if model.get_output_embeddings() is None:
        raise ValueError(f"{type(model).__name__} has no language-model head; load it with AutoModelForCausalLM")
    require_maps(arm, phi)
    prompt = input_ids.to(device_of(model))
    length, steps, ends = prompt.shape[1], max_new_tokens - 1, end_tokens(model, eos_token_id)
    read = prefill(model, prompt.tolist())
    first = read.next_token
    if steps == 0 or int(first) in ends:
        return torch.cat((prompt, first.unsqueeze(1)), dim=1)
    k = retrieved_by(arm, length, anchors, None)
    decoder = StaticDecoder(model, fill_buffers([read], steps), rule, k, anchors, phi, steps)
    if decoder.sizes_on_device:  # a graph of every step would take longer than to run them once
        decoder.prepare()
    return torch.cat((prompt, first.unsqueeze(1), decoder.run(first, ends)), dim=1)
