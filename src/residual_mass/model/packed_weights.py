"""`pack_weights`: linear layers in 4 or 8 bits on a CPU, by torch's products of packed weights.

A product of few rows, a decode step's, reads the codes: `aten::_weight_int4pack_mm_for_cpu` or
`aten::_weight_int8pack_mm`, with activations in bfloat16, for which alone they are fast. A product of many rows, a
prompt's, dequantises this one layer to the dtype of the activations. Both read the same codes.

Shape letters: M = rows of activations, N / K = output / input features, g = group of weights with a scale and a zero.
"""

from __future__ import annotations

import ctypes
import logging
import math
import sys
import warnings
from collections.abc import Iterable, Iterator
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from residual_mass.kernels.cpu import has_bfloat16
from residual_mass.model.weight_codes import MIDDLE, codes_of_4_bits, codes_of_8_bits

log = logging.getLogger(__name__)

GROUPS = (32, 64, 128, 256)
"""Weights of a group that torch's 4-bit product knows."""
ROW_MULTIPLE = 64
"""Output features are a multiple of this in 4 bits, so that torch packs them in whole blocks; others are 0."""
COLUMN_MULTIPLE = 32
"""Input features are a multiple of this in 8 bits: torch reads beyond the end of rows of other lengths."""
LAYOUTS = ((64, 32), (32, 16), (32, 1))
"""Rows of a block, and how far apart the two rows of a byte are: with AVX-512, AVX2, and neither."""
ROUTERS = ("gate", "router", "shared_expert_gate")
"""Names of layers that choose experts. Rounding them would change which weights are read, and they are small."""
FALCON = "transformers.models.falcon.modeling_falcon.FalconLinear"
PLAIN_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool)
"""Dtypes of plain weights, positions and masks. Whether a model was loaded by a quantiser says less: transformers
dequantises GGUF files by one.
"""
UNSAFE_METHODS = ("save_pretrained", "resize_token_embeddings")
"""Methods that do not know packed weights, and would leave a model or its files half changed."""


# ---- layers ----------------------------------------------------------------------------------------------------------


class PackedLinear(nn.Module):
    """A linear layer whose weight is in codes.

    Attributes:
        codes: as torch's product reads them; integers, which `model.to(dtype)` leaves as they are.
        scales: bfloat16, which they stay.
        bias: [N] or None, in the dtype of the model.
    """

    most_rows: int
    """Rows up to which the product of packed weights is the faster one."""
    codes: Tensor
    scales: Tensor

    def __init__(self, rows: int, columns: int, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.in_features = columns
        self.out_features = rows
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """Computes [..., N] in the dtype of x [..., K]."""
        if self.codes.device.type != "cpu":
            raise ValueError(
                f"the weights are packed for a CPU, and the model is on {self.codes.device}: move it back with "
                'model.to("cpu"), or load it again for that device'
            )
        rows = math.prod(x.shape[:-1])
        if rows > self.most_rows:
            return F.linear(x, self.dequantised(x.dtype), self.bias)
        flat = x.reshape(rows, self.in_features).to(torch.bfloat16).contiguous()
        output = self.product(flat)[:, : self.out_features]
        output = output.to(x.dtype).reshape(*x.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias

    def product(self, x: Tensor) -> Tensor:
        """Computes [M, N or more] of x [M, K] in bfloat16 by torch's product of packed weights."""
        raise NotImplementedError

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Returns the weight [N, K]."""
        raise NotImplementedError

    @property
    def weight(self) -> Tensor:
        """The weight [N, K], made anew in the dtype of the bias or the scales; it can neither be set nor be tied."""
        return self.dequantised(self.scales.dtype if self.bias is None else self.bias.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _apply(self, fn: Any, recurse: bool = True) -> PackedLinear:
        scales = self.scales
        super()._apply(fn, recurse)
        if self.scales.dtype != scales.dtype:
            self.scales = scales.to(self.scales.device)  # not rounded twice, and the dtype that torch's product takes
        return self


class Linear4(PackedLinear):
    """A linear layer with weights in 4 bits; where they are dequantised codes, with these codes.

    Attributes:
        codes: [N', K' / 2] uint8 in the layout of this CPU, N' and K' the next multiples of `ROW_MULTIPLE` and g.
        scales: [K' / g, N', 2] bfloat16, scale and zero.
    """

    most_rows = 32

    def __init__(self, weight: Tensor, bias: nn.Parameter | None, group: int) -> None:
        super().__init__(*weight.shape, bias)
        self.group = group
        self.layout = layout_here()
        codes, scale, zero = codes_of_4_bits(widened(weight, group), group)
        more = -len(codes) % ROW_MULTIPLE
        scales = F.pad(torch.stack((scale, zero), -1), (0, 0, 0, 0, 0, more))
        codes = F.pad(codes.to(torch.int32), (0, 0, 0, more))
        self.register_buffer("codes", packed_codes(codes))
        self.register_buffer("scales", scales.transpose(0, 1).contiguous())

    def product(self, x: Tensor) -> Tensor:
        more = -self.in_features % self.group
        if more:
            x = F.pad(x, (0, more))
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.codes, self.group, self.scales)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Returns the weight [N, K], of strides (1, N'): both are faster by column."""
        codes = unpacked_codes(self.codes, self.layout)
        signed = codes.sub_(MIDDLE).view(torch.int8)  # wraps around below 0
        groups = signed.to(dtype).unflatten(0, (-1, self.group))
        scale = self.scales[:, None, :, 0].to(dtype).contiguous()
        zero = self.scales[:, None, :, 1].to(dtype).contiguous()
        weight = torch.addcmul(zero, groups, scale).flatten(0, 1)
        return weight[: self.in_features, : self.out_features].T

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bits=4, group={self.group}"

    def get_extra_state(self) -> Tensor:
        """Returns the layout of the codes, which other CPUs read as other weights."""
        return torch.tensor(self.layout)

    def set_extra_state(self, state: Tensor) -> None:
        require_layout(state.tolist())

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        require_layout(self.layout)


class Linear8(PackedLinear):
    """A linear layer with weights in 8 bits.

    Attributes:
        codes: [N, K'] int8, K' the next multiple of `COLUMN_MULTIPLE`.
        scales: [N] bfloat16.
    """

    most_rows = 16

    def __init__(self, weight: Tensor, bias: nn.Parameter | None) -> None:
        super().__init__(*weight.shape, bias)
        codes, scales = codes_of_8_bits(widened(weight, COLUMN_MULTIPLE))
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)

    def product(self, x: Tensor) -> Tensor:
        more = -self.in_features % COLUMN_MULTIPLE
        if more:
            x = F.pad(x, (0, more))
        return torch.ops.aten._weight_int8pack_mm(x, self.codes, self.scales)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        weight = self.codes.to(dtype)
        weight *= self.scales.to(dtype)[:, None]
        return weight[:, : self.in_features]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bits=8"


class PackedEmbedding(nn.Module):
    """An embedding that reads the rows of the head to which it was tied.

    Args:
        head: its codes and scales stay those of the head.
        padding_idx: as in `nn.Embedding`; it matters for gradients alone.
    """

    like: Tensor
    """No numbers, in the dtype that is returned."""

    def __init__(self, head: Linear8, padding_idx: int | None, dtype: torch.dtype) -> None:
        super().__init__()
        self._head = [head]  # in a list, so that it is no module of this one, too
        self.num_embeddings = head.out_features
        self.embedding_dim = head.in_features
        self.padding_idx = padding_idx
        self.register_buffer("like", torch.empty(0, dtype=dtype), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the vectors [..., K] of ids [...]."""
        head = self._head[0]
        codes = head.codes[ids][..., : self.embedding_dim]
        return codes.to(self.like.dtype) * head.scales[ids].to(self.like.dtype).unsqueeze(-1)

    @property
    def weight(self) -> Tensor:
        """The embedding [N, K], made anew; it can neither be set nor be tied."""
        return self._head[0].dequantised(self.like.dtype)


def widened(weight: Tensor, multiple: int) -> Tensor:
    """Repeats the last column of a weight [N, K] up to a multiple; inputs are 0 there."""
    more = -weight.shape[1] % multiple
    return torch.cat((weight, weight[:, -1:].expand(-1, more)), 1)


def packed_codes(codes: Tensor) -> Tensor:
    """Packs codes [N', K'] int32 as torch's product reads them on this CPU: [N', K' / 2] uint8."""
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.contiguous(), 1)


def unpacked_codes(packed: Tensor, layout: tuple[int, int]) -> Tensor:
    """Returns the codes [K', N'] uint8 of packed ones [N', K' / 2]."""
    block, apart = layout
    rows = packed.shape[0]
    blocks = packed.view(rows // block, -1, block // 2)  # of all columns, one after the other
    pair = (blocks & 15, blocks >> 4)
    codes = torch.stack(pair, -1 if apart == 1 else 2)
    return codes.transpose(0, 1).reshape(-1, rows)


@cache
def layout_here() -> tuple[int, int]:
    """Returns the layout in which torch packs 4-bit codes on this CPU, one of `LAYOUTS`.

    Raises:
        ValueError: it is none of them.
    """
    codes = torch.arange(ROW_MULTIPLE * 4, dtype=torch.int32).view(ROW_MULTIPLE, 4) * 7 % 15
    packed = packed_codes(codes)
    for layout in LAYOUTS:
        if torch.equal(unpacked_codes(packed, layout).T, codes.to(torch.uint8)):
            return layout
    raise ValueError(f"torch {torch.__version__} packs weights of 4 bits in an unknown layout here: take bits=8")


def require_layout(layout: Any) -> None:
    """Raises ValueError unless codes in a layout are read rightly on this CPU."""
    if tuple(layout) != layout_here():
        raise ValueError(
            f"the weights were packed for another CPU (blocks of {layout[0]} rows, here {layout_here()[0]}): load the "
            "model again and pack its weights here"
        )


# ---- models ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def pack_weights(model: PreTrainedModel, bits: int = 4, group: int = 32) -> PreTrainedModel:
    """Packs the weights of a model's linear layers in place, for generation on a CPU. The language-model head gets
    8 bits in any case. A summary of what was packed is then in `model.packed_weights`.

    With 8 bits, every output feature has a scale; with 4, every group of input features has a scale and a zero. Weights
    that were dequantised from grids of 16 levels (GGUF files in Q4_0, Q4_1 or Q4_K) keep their codes. Products of up to
    32 rows (16 in 8 bits) round activations to bfloat16, whatever the dtype of the model.

    What is not packed is then in bfloat16 if the CPU has instructions for it, with the exceptions that transformers
    makes, as if the model had been loaded in bfloat16; a model in float64 stays in float64. Embeddings, routers,
    experts that are held in one tensor, and linear layers with hooks or of a class of their own are not packed, but a
    plain embedding that is tied to the head reads the rows of the head.

    Args:
        bits: 4 or 8.
        group: weights with a scale and a zero in 4 bits: 32, 64, 128 or 256.

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
    places = places_of(model)
    if bits == 4:
        layout_here()
    before = bytes_of(model.modules())
    for names in places:
        layer = model.get_submodule(names[0])
        weight = layer.weight.T if isinstance(layer, Conv1D) else layer.weight
        if layer is head:
            untie(model)
        if bits == 8 or layer is head:
            new = Linear8(weight, layer.bias)
        else:
            new = Linear4(weight, layer.bias, group)
        for name in names:
            model.set_submodule(name, new.eval())
        if layer is head and shared:
            model.set_input_embeddings(PackedEmbedding(new, embedding.padding_idx, weight.dtype).eval())
    left = (module for module in model.modules() if not isinstance(module, PackedLinear))
    share = 1 - bytes_of(left) / before
    if has_bfloat16():
        convert_rest(model)
    give_back_memory()
    for name in UNSAFE_METHODS:
        setattr(model, name, partial(refuse, name))
    kind = "8 bits" if bits == 8 else f"4 bits in groups of {group} (head: 8)"
    now = bytes_of(model.modules())
    model.packed_weights = (
        f"{len(places)} linear layers in {kind}, {share:.0%} of the weights; {now / 2**20:.1f} MiB, "
        f"{before / 2**20:.1f} before"
    )
    log.info("%s", model.packed_weights)
    if share < 0.5:
        warnings.warn(
            f"pack_weights: most of {type(model).__name__} stays as it is: {model.packed_weights}", stacklevel=3
        )
    return model


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
    hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return not hooked and name.rpartition(".")[2] not in ROUTERS


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


def convert_rest(model: PreTrainedModel) -> None:
    """Rounds parameters in float32 and float16 to bfloat16, as `from_pretrained(dtype=torch.bfloat16)` would.

    Buffers stay as they are: transformers computes rotary frequencies in float32.
    """
    wide = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    for module in model.modules():
        if isinstance(module, PackedEmbedding) and module.like.dtype != torch.float64:
            module.to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if parameter.dtype in (torch.float32, torch.float16) and not wide.intersection(name.split(".")):
            parameter.data = parameter.data.to(torch.bfloat16)


def give_back_memory() -> None:
    """Returns freed memory to the system where the C library keeps it: glibc holds on to hundreds of MiB here."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


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
