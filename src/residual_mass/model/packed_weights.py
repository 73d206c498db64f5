"""`pack_weights`: a model's linear layers in 4 or 8 bits on a CPU, in place."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator
from functools import partial
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from residual_mass.kernels.cpu import has_bfloat16
from residual_mass.model.memory import give_back_memory, move_to_huge_pages
from residual_mass.model.packed_linear import PackedEmbedding, PackedHead, PackedLinear
from residual_mass.model.weight_codes import Codes, codes_of_4_bits, codes_of_8_bits, lies_on_grids

log = logging.getLogger(__name__)

GROUPS = (32, 64, 128, 256)
"""Weights with a scale that can be asked for."""
HEAD_GROUP = 32
ROUTERS = ("gate", "router", "shared_expert_gate")
"""Names of layers that choose experts. Rounding them would change which weights are read, and they are small."""
FALCON = "transformers.models.falcon.modeling_falcon.FalconLinear"
PLAIN_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool)
"""Dtypes of plain weights, positions and masks. Whether a model was loaded by a quantiser says less: transformers
dequantises GGUF files by one.
"""
UNSAFE_METHODS = ("save_pretrained", "resize_token_embeddings")
"""Methods that do not know packed weights, and would leave a model or its files half changed."""


@torch.no_grad()
def pack_weights(model: PreTrainedModel, bits: int = 4, group: int = 32, mixed: bool = True) -> PreTrainedModel:
    """Packs the weights of a model's linear layers in place, for generation on a CPU. The language-model head gets
    8 bits in any case. How many layers kept their codes, how many were rounded, and by how much, is then in
    `model.packed_weights`.

    Every group of input features of an output feature has a scale, and a minimum with 4 bits. Weights that were
    dequantised from grids of 16 levels (GGUF files in Q4_0, Q4_1 or Q4_K), or from Q8_0, keep their codes.

    Products round activations to 16 bits by group, and add in float32; in a model in float64, weights are dequantised
    for exact products. Logits are in float32 (in float64 if the model is), in a model in bfloat16, too.

    What is not packed is then in bfloat16 if the CPU has instructions for it, with the exceptions that transformers
    makes, as if the model had been loaded in bfloat16; a model in float64 stays in float64. Embeddings, routers,
    experts that are held in one tensor, and linear layers with hooks or of a class of their own are not packed, but a
    plain embedding that is tied to the head reads the rows of the head.

    Args:
        bits: 4 or 8.
        group: weights with a scale: 32, 64, 128 or 256; those of the head are 32.
        mixed: with 4 bits, packs layers that were dequantised from codes which groups of `group` cannot keep in groups
            of 32, if these can, or in 8 bits (Q5, Q6_K and Q8_0 in GGUF files). False packs every layer alike.

    Returns:
        The same model.

    Raises:
        ValueError: bits or group are others; the model is not of transformers, is packed or quantised already, is in
            training mode, has an adapter, is sharded, offloaded or not on a CPU, ties weights other than those of head
            and embedding, or has no linear layers. It is then as it was.
    """
    if type(bits) is not int or bits not in (4, 8):
        raise ValueError(f"bits is {bits!r}, not 4 or 8")
    if type(group) is not int or group not in GROUPS:
        raise ValueError(f"group is {group!r}, not one of {', '.join(map(str, GROUPS))}")
    require_packable(model)
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    shared = head is not None and type(embedding) is nn.Embedding and head.weight is embedding.weight
    shared = shared and is_plain(embedding)
    places = places_of(model)
    before = bytes_of(model.modules())
    layers = []
    for names in places:
        layer = model.get_submodule(names[0])
        # Conv1D, of GPT-2, keeps the transpose [K, N].
        weight = layer.weight.T if isinstance(layer, Conv1D) else layer.weight
        if layer is head:
            untie(model)
            codes = codes_of_8_bits(weight, HEAD_GROUP)
        else:
            codes = codes_of(weight, bits, group, mixed)
        kind = PackedHead if layer is head else PackedLinear
        new = kind(codes, weight.shape[1], layer.bias, weight.dtype)
        layers.append(new)
        for name in names:
            model.set_submodule(name, new.eval())
        if layer is head and shared:
            model.set_input_embeddings(PackedEmbedding(new, embedding.padding_idx, weight.dtype).eval())
    # Counted before `settle_rest`, which changes the size of what is not packed.
    left = (module for module in model.modules() if not isinstance(module, PackedLinear))
    share = 1 - bytes_of(left) / before
    settle_rest(model, copy=share >= 0.5)
    seal(model, layers, share, f"{before / 2**20:.1f} before")
    if share < 0.5:
        warnings.warn(
            f"pack_weights: most of {type(model).__name__} stays as it is: {model.packed_weights}", stacklevel=3
        )
    return model


def seal(model: PreTrainedModel, layers: list[PackedLinear], share: float, before: str) -> None:
    """Gives packed layers their place in memory, says how the model is packed, and refuses methods that do not know
    packed weights.

    Args:
        share: of the weights that are packed.
        before: MiB that the weights had.
    """
    move_to_huge_pages(layers)
    give_back_memory()
    for name in UNSAFE_METHODS:
        setattr(model, name, partial(refuse, name))
    now = bytes_of(model.modules())
    model.packed_weights = f"{summary_of(layers)}, {share:.0%} of the weights; {now / 2**20:.1f} MiB, {before}"
    log.info("%s", model.packed_weights)


def codes_of(weight: Tensor, bits: int, group: int, mixed: bool) -> Codes:
    """Returns the codes of one weight [N, K], as `pack_weights` says."""
    if bits == 8:
        return codes_of_8_bits(weight, group)
    codes = codes_of_4_bits(weight, group)
    if codes.kept or not mixed or not lies_on_grids(weight):
        return codes
    # A scale of GGUF covers at most 32 weights, so larger groups can span several grids.
    if group > GROUPS[0]:
        codes = codes_of_4_bits(weight, GROUPS[0])
    return codes if codes.kept else codes_of_8_bits(weight, GROUPS[0])


def summary_of(layers: list[PackedLinear]) -> str:
    """Returns how many layers are kept how, with the mean of their errors."""
    errors: dict[str, list[float]] = {}
    for layer in layers:
        errors.setdefault(layer.how(), []).append(layer.error)
    parts = [f"{len(each)} {how} (off by {mean(each):.2%})" for how, each in errors.items()]
    return ", ".join(parts).replace(" in ", " linear layers in ", 1)


def places_of(model: PreTrainedModel) -> list[list[str]]:
    """Returns the names of every layer that can be packed: several if the model uses it in several places."""
    places: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if is_packable(name, module):
            places.setdefault(id(module), []).append(name)
    if not places:
        raise ValueError(f"{type(model).__name__} has no linear layers that could be packed")
    return list(places.values())


def is_packable(name: str, module: nn.Module) -> bool:
    """Returns whether a module computes what a linear layer does and nothing else."""
    kind = type(module)
    if kind not in (nn.Linear, Conv1D) and f"{kind.__module__}.{kind.__name__}" != FALCON:
        return False
    return is_plain(module) and name.rpartition(".")[2] not in ROUTERS


def is_plain(module: nn.Module) -> bool:
    """Returns whether calls of a module compute what its class does: it has no hooks, and no limit on its vectors."""
    changed = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return not changed and getattr(module, "max_norm", None) is None


def bytes_of(modules: Iterable[nn.Module]) -> int:
    """Returns the bytes of the parameters and buffers that modules have themselves, each counted once."""
    tensors = {}
    for module in modules:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensors[id(tensor)] = tensor.numel() * tensor.itemsize
    return sum(tensors.values())


def untie(model: PreTrainedModel) -> None:
    """Makes configurations say that the head has weights of its own, so that nothing ties them again."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            for config in (module.config, module.config.get_text_config(decoder=True)):
                config.tie_word_embeddings = False
    model.all_tied_weights_keys = {}


def settle_rest(model: PreTrainedModel, copy: bool) -> None:
    """Rounds parameters in float32 and float16 to bfloat16 if that is fast here, as loading in bfloat16 would.

    Buffers stay as they are: transformers computes rotary frequencies in float32.

    Args:
        copy: copies all others too, so that none keeps a whole file of weights mapped into memory.
    """
    fast = has_bfloat16()
    wide = wide_modules(model)
    for module in model.modules():
        if fast and isinstance(module, (PackedLinear, PackedEmbedding)) and module.like.dtype != torch.float64:
            module.like = module.like.to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        dtype = parameter.dtype
        if fast and dtype in (torch.float32, torch.float16) and not wide.intersection(name.split(".")):
            dtype = torch.bfloat16
        # In place of its numbers alone, so that modules that share the parameter still do.
        parameter.data = parameter.data.to(dtype, copy=copy)


def wide_modules(model: PreTrainedModel) -> set[str]:
    """Returns names within those of parameters that transformers keeps in float32 in a model in bfloat16."""
    return set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())


def refuse(name: str, *args: Any, **kwargs: Any) -> None:
    raise ValueError(f"{name}: the model's weights are packed; call {name} before pack_weights, on the model as loaded")


# ---- what is not packed ----------------------------------------------------------------------------------------------


def require_packable(model: PreTrainedModel) -> None:
    """Raises ValueError, with the reason and a remedy, for a model whose weights are not plain numbers on a CPU."""
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"pack_weights takes a model of transformers, not a {kind}: pack it before an adapter or a compiler wraps "
            "it (merge_and_unload() merges an adapter)"
        )
    for reason in refusals(model):
        raise ValueError(f"{kind} {reason}")


def refusals(model: PreTrainedModel) -> Iterator[str]:
    """Yields why a model's weights cannot be packed."""
    if model.training:
        yield "is in training mode, and packed weights have no gradients: call model.eval()"
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            yield "has packed weights already: load it again to pack them otherwise"
        if hasattr(module, "base_layer") or type(module).__module__.startswith("peft."):
            yield f"has an adapter ({name}): merge it into the weights (merge_and_unload()) first"
        if hasattr(module, "_hf_hook"):
            yield f"is placed by accelerate ({name}): load the whole model on the CPU, without a device_map"
        if type(module).__module__.startswith("torch.ao."):
            yield f"has quantised weights already ({name}): load it again"
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        yield from tensor_refusals(name, tensor)
    yield from tied(model)


def tensor_refusals(name: str, tensor: Tensor) -> Iterator[str]:
    """Yields why the weights of one tensor cannot be packed."""
    # Parameter is a class itself; `data` shows the subclasses that quantisers keep weights in.
    if type(tensor.data) is not Tensor:
        yield f"has weights of another kind ({name} is a {type(tensor.data).__name__}): load it whole, not quantised"
    if tensor.device.type == "meta":
        yield f"has no weights in memory ({name} is on the meta device): load it whole, without offloading"
    if tensor.device.type != "cpu":
        yield f"is on {tensor.device} ({name}), and weights are packed for a CPU: call model.to('cpu') first"
    if tensor.ndim >= 2 and tensor.dtype not in PLAIN_DTYPES:
        yield f"has quantised weights already ({name} is {tensor.dtype}): load it without quantisation"


def tied(model: PreTrainedModel) -> Iterator[str]:
    """Yields which linear layers share their weights with others, but for a head with the embedding."""
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    first: dict[int, str] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if weight is None or (module is head and weight is getattr(embedding, "weight", None)):
            continue
        if id(weight) in first and is_packable(name, module):
            yield f"ties {name} to {first[id(weight)]}, and packed weights cannot be tied"
        first.setdefault(id(weight), name)
