"""Models of GGUF files, whose linear layers and embeddings keep the codes that the file has.

What a tensor is called in transformers, and what must be done to it, is transformers' own knowledge. It dequantises
every tensor to float32, which takes ten times the file's memory; here that is done to tensors that cannot be packed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import gguf
import numpy as np
import torch
from accelerate import init_empty_weights
from gguf.gguf_reader import GGUFReader, GGUFValueType, ReaderTensor
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from residual_mass.model.gguf_blocks import FORMATS, codes_of_blocks
from residual_mass.model.gguf_rotary import divide_frequencies
from residual_mass.model.packed_linear import PackedEmbedding, PackedHead, PackedLinear
from residual_mass.model.packed_weights import HEAD_GROUP, is_packable, is_plain, seal, untie, wide_modules
from residual_mass.model.weight_codes import Codes, codes_of_8_bits


class Reader(GGUFReader):
    """Reads a file's header; an array becomes a few objects, where its base class makes several of every element.

    A vocabulary of 150,000 strings takes .3 s, not 4.
    """

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        kind = GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        count = int(self._get(orig_offs + 4, np.uint64)[0])
        begin = orig_offs + 12  # after the kind, 4 bytes, and the count, 8
        scalar = self.gguf_scalar_to_np.get(kind)
        if kind == GGUFValueType.STRING:
            parts, end = self._strings(begin, count)
        elif scalar is not None:
            values = np.asarray(self._get(begin, scalar, count))
            self._require(len(values) == count)
            parts = list(values[:, None])
            end = begin + values.nbytes
        else:
            return super()._get_field_parts(orig_offs, raw_type)
        return end - orig_offs, parts, list(range(count)), [GGUFValueType.ARRAY, kind]

    def _strings(self, begin: int, count: int) -> tuple[list[memoryview], int]:
        data = memoryview(self.data)
        strings = []
        for _ in range(count):
            first = begin + 8  # a string's length has 8 bytes
            begin = first + int.from_bytes(data[begin:first], "little")
            self._require(begin <= len(data))
            strings.append(data[first:begin])
        return strings, begin

    def _require(self, whole: bool) -> None:
        if not whole:
            raise ValueError("its header is longer than the file")


@contextmanager
def quick_headers() -> Iterator[None]:
    """Lets transformers read headers by `Reader`: it reads them for the configuration, the tokenizer and the model; and
    make gguf's table of names once, not for every module.
    """
    table = functools.cache(gguf.get_tensor_name_map)
    with mock.patch.object(gguf, "GGUFReader", Reader), mock.patch.object(gguf, "get_tensor_name_map", table):
        yield


def packed_model(reader: Reader, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Loads the model of a file for a CPU, packed.

    Args:
        config: as transformers reads it from the file.
        dtype: of what is not packed, and in which products are returned.

    Raises:
        NotImplementedError: gguf does not know the names of this architecture's tensors, or a format.
        ValueError: the file lacks tensors.
    """
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    architecture = reader.fields["general.architecture"].contents()
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    names = get_gguf_hf_weights_map(model, processor)
    parsed: dict[str, dict[str, Tensor]] = {"tensors": {}}
    layers = []
    for tensor in reader.tensors:
        name = names.get(tensor.name, "")
        module = model.get_submodule(name.removesuffix(".weight")) if name.endswith(".weight") else None
        order = row_order(processor, tensor) if may_be_packed(model, name, module, tensor) else None
        if order is not None:
            layers.append(put(model, name.removesuffix(".weight"), module, tensor, order, dtype))
            continue
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
        found = processor.process(weights=numbers, name=tensor.name, tensor_key_mapping=names, parsed_parameters=parsed)
        if found.name in names:
            parsed["tensors"][names[found.name]] = torch.from_numpy(np.array(found.weights))
    fill(model, parsed["tensors"], dtype)
    divide_frequencies(model, reader)
    packed = sum(layer.out_features * layer.in_features for layer in layers)
    share = packed / (packed + sum(parameter.numel() for parameter in model.parameters()))
    seal(model, layers, share, f"{len(reader.data) / 2**20:.1f} in its file")
    return model


def may_be_packed(model: PreTrainedModel, name: str, module: nn.Module | None, tensor: ReaderTensor) -> bool:
    """Returns whether a tensor is the weight of a linear layer, or of the embedding, in blocks."""
    columns, _ = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
    if module is None or columns == 1:  # 1 in formats without blocks: float32 and others
        return False
    if module is model.get_input_embeddings():
        return type(module) is nn.Embedding and is_plain(module)
    return type(module) is nn.Linear and is_packable(name.removesuffix(".weight"), module)


def row_order(processor: TensorProcessor, tensor: ReaderTensor) -> Tensor | None:
    """Returns the order [N] into which transformers puts the rows of a tensor; None if it changes more than that.

    Its processors are asked with the numbers of the rows in place of weights. llama.cpp stores the rows of queries and
    keys of some families in pairs that its rotary embedding turns; others are transposed.
    """
    rows = np.arange(len(tensor.data), dtype=np.float32)[:, None]
    try:
        order = processor.process(weights=rows, name=tensor.name, tensor_key_mapping={}, parsed_parameters={}).weights
    except (ValueError, KeyError):  # of a shape that it cannot have
        return None
    if order.shape != rows.shape or not np.array_equal(np.sort(order, axis=0), rows):
        return None
    return torch.from_numpy(order[:, 0]).long()


def codes_in(tensor: ReaderTensor, order: Tensor) -> Codes:
    """Returns the codes of a tensor's rows in an order: its own, or of 8 bits in formats that `FORMATS` lacks."""
    blocks = np.array(tensor.data)  # a copy: the file is mapped into memory and read only
    kind = tensor.tensor_type
    if kind.name in FORMATS:
        return codes_of_blocks(torch.from_numpy(blocks)[order], kind.name)
    numbers = torch.from_numpy(gguf.dequantize(blocks, kind))
    return codes_of_8_bits(numbers[order], HEAD_GROUP)


def put(
    model: PreTrainedModel, name: str, module: nn.Module, tensor: ReaderTensor, order: Tensor, dtype: torch.dtype
) -> PackedLinear:
    """Puts a packed layer in the place of one without weights; an embedding reads the rows of the head to which it is
    tied.
    """
    # GGUF lists the axis of adjacent elements first.
    shape = tensor.shape.tolist()[::-1]
    wanted = list(module.weight.shape)
    if shape != wanted:
        raise ValueError(f"{name}.weight is {shape} in its tensors, {wanted} by its header")
    codes = codes_in(tensor, order)
    head = model.get_output_embeddings()
    is_embedding = module is model.get_input_embeddings()
    is_tied = is_embedding and head is not None and model.config.get_text_config().tie_word_embeddings
    kind = PackedHead if module is head or is_tied else PackedLinear
    packed = kind(codes, shape[1], getattr(module, "bias", None), dtype)  # its bias, if any, is filled in later
    if is_tied:
        untie(model)
        model.set_output_embeddings(packed)
    if is_embedding:
        model.set_input_embeddings(PackedEmbedding(packed, module.padding_idx, dtype, shared=is_tied))
    else:
        model.set_submodule(name, packed)
    return packed


def fill(model: PreTrainedModel, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Gives a model the tensors that are not packed; raises ValueError if it then lacks some."""
    wide = wide_modules(model)
    typed = {}
    for name, numbers in tensors.items():
        typed[name] = numbers if wide.intersection(name.split(".")) else numbers.to(dtype)
    model.load_state_dict(typed, strict=False, assign=True)
    model.tie_weights()
    missing = [name for name, tensor in model.named_parameters() if tensor.device.type == "meta"]
    if missing:
        raise ValueError(f"it lacks tensors ({len(missing)}, first {missing[0]})")


def ends_of(reader: GGUFReader) -> list[int]:
    """Returns the tokens that end a text, a turn or a message by the header of a file."""
    fields = [reader.fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return sorted({int(field.contents()) for field in fields if field is not None})


def parts_of(reader: GGUFReader) -> int:
    """Returns of how many files the model is, by the header of one."""
    field = reader.fields.get("split.count")
    return 1 if field is None else int(field.contents())
