"""What decides the numbers that a model computes: its identity, by which results of it are found again or refused."""

from __future__ import annotations

import hashlib
import json
import operator
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from residual_mass import __version__
from residual_mass.files import sha256_of, sha256_text
from residual_mass.model.layers import unwrapped
from residual_mass.model.rotary import changes_with_length

Identity = dict[str, str]
"""Facts on a model by their names, as text."""
NO_FACTS = (
    "architectures transformers_version dtype torch_dtype name_or_path attn_implementation use_cache output_attentions "
    "output_hidden_states return_dict bos_token_id eos_token_id pad_token_id id2label label2id"
).split()
"""Keys of configurations that change no key, value or logit: the class and the dtypes of tensors are facts themselves.
So are not those with a leading underscore, by which transformers keeps paths and chosen implementations.
"""
OF_USE = ("training", "max_seq_len_cached")
"""Attributes of modules that change with their use."""
OF_ADAPTERS = ("_active_adapter", "_disable_adapters")
"""Private attributes of peft's layers that decide what they compute."""
FILES_OF_MODELS = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".safetensors")
"""Suffixes of the files from which transformers makes a model and its tokenizer."""
HASHED = {
    "modules": "its modules have other settings, such as constants or adapters",
    "weights": "its weights have other numbers",
}
"""Facts that are hashes, with what is said where they differ."""
MOST_SHOWN = 3
"""Differences that a message names."""
LONGEST_SHOWN = 60
"""Characters of a value in a message."""


def identity_of(model: nn.Module) -> Identity:
    """Returns what decides the keys, values and logits of a model in memory but for rounding: class, configuration,
    dtypes, how weights are packed, the versions of transformers and of this package, and hashes of its modules and of
    all its weights. It reads every weight: 0.5 to 0.7 s for 540 MB on one core.

    Models that were loaded from the same files have the same identity in every process and place; so has a model that
    was saved and loaded again. The number of threads, the instructions of the CPU and the version of torch are no part
    of it, but codes of 4 bits lie as the CPU reads them.

    Args:
        model: of transformers; it may be compiled or within an adapter, whose weights count, merged or not.

    Raises:
        ValueError: weights are on the meta device, and no hook of accelerate holds them.
    """
    model = unwrapped(model)
    tensors = tensors_of(model)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # hashing is outside of Python's lock
        hashes = list(pool.map(hash_of, tensors))
    dtypes = set()
    lines: dict[bool, list[str]] = {True: [], False: []}
    for tensor, (dtype, numbers) in zip(tensors, hashes, strict=True):
        lines[tensor.is_saved] += [f"{name} {dtype} {numbers}" for name in tensor.names]
        if tensor.is_saved:
            dtypes.add(dtype)
    facts = {"class": type(model).__name__, "dtype": ", ".join(sorted(dtypes))}
    facts["packed weights"] = getattr(model, "packed_weights", "none")
    facts |= dict(facts_of(model.config, "config"))
    facts |= {"version of transformers": transformers.__version__, "version of residual-mass": __version__}
    facts["modules"] = sha256_text("\n".join(sorted((*settings_of(model), *lines[False]))))
    facts["weights"] = sha256_text("\n".join(sorted(lines[True])))
    return facts


def digest_of(identity: Mapping[str, str]) -> str:
    """Returns the sha256 of facts, whatever their order."""
    return sha256_text(json.dumps(identity, sort_keys=True))


def difference(stored: Mapping[str, str], own: Mapping[str, str]) -> str | None:
    """Returns which facts differ, in one line; None if none do.

    Args:
        stored: of a model in the past.
        own: of the model here.
    """
    differing = []
    for name in dict.fromkeys((*own, *stored)):
        then = stored.get(name, "none")
        here = own.get(name, "none")
        if then == here:
            continue
        if name in HASHED:
            differing.append(HASHED[name])
        else:  # a damaged file may have any name
            differing.append(f"{shown(name)} was {shown(then)} and is {shown(here)} here")
    if len(differing) > MOST_SHOWN:
        differing[MOST_SHOWN:] = [f"and {len(differing) - MOST_SHOWN} more"]
    return "; ".join(differing) or None


def shown(value: object) -> str:
    return textwrap.shorten(str(value), LONGEST_SHOWN, placeholder=" ...")


def files_digest(folder: Path) -> str:
    """Returns a hash of the names and the content of the files from which transformers makes a model and its
    tokenizer, wherever the folder lies and whenever it was written.

    Raises:
        OSError: a file cannot be read; names it.
    """
    files = [file for file in sorted(folder.iterdir()) if file.suffix in FILES_OF_MODELS and not file.is_dir()]
    return listed_digest(files)


def listed_digest(files: Iterable[Path]) -> str:
    """Returns a hash of the names and the content of files."""
    return sha256_text("\n".join(f"{file.name} {sha256_of(file)}" for file in files))


# ---- parts of a model ------------------------------------------------------------------------------------------------


def facts_of(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yields the values of a configuration, each under its path, such as `config.rope_parameters.rope_theta`."""
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    if not isinstance(value, dict):
        yield name, json.dumps(value, default=as_json)
        return
    for key, each in sorted(value.items(), key=str):
        if key not in NO_FACTS and not str(key).startswith("_"):
            yield from facts_of(each, f"{name}.{key}")


def as_json(value: Any) -> Any:
    """Returns what JSON does not know as it does, sets in the same order in every process."""
    return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else str(value)


def settings_of(model: nn.Module) -> Iterator[str]:
    """Yields the class and the plain values of every module below a model, such as an epsilon, the group of packed
    weights or the scaling of an adapter: they need not be those of the configuration.
    """
    for name, module in model.named_modules(remove_duplicate=False):
        if "_orig_mod" in module._modules:  # the compiled form of the next one
            continue
        values = {} if isinstance(module, PreTrainedModel) else vars(module)
        found = []
        for key, value in sorted(values.items()):
            counts = key in OF_ADAPTERS or not key.startswith("_")
            if counts and key not in OF_USE and is_plain(value):
                found.append(f"{key} {value!r}")
        yield f"{plain_name(name)} {type(module).__name__} {', '.join(found)}"


def is_plain(value: Any) -> bool:
    """Returns whether a value is a number, a text, or a list or dict of such."""
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    return isinstance(value, (bool, int, float, str))


def plain_name(name: str) -> str:
    """Returns the name of a tensor or module as it is in a model of which nothing is compiled."""
    return name.replace("._orig_mod", "")


@dataclass
class Held:
    """A parameter or buffer of a model.

    Attributes:
        is_saved: whether a saved model has it.
        read: returns its numbers.
        names: in the model, several if it is tied.
    """

    is_saved: bool
    read: Callable[[], Tensor]
    names: list[str] = field(default_factory=list)


def tensors_of(model: nn.Module) -> list[Held]:
    """Returns all parameters and buffers, but for frequencies that follow the length of the last text.

    Raises:
        ValueError: one is on the meta device, and no hook of accelerate holds it.
    """
    hooked: dict[str, Mapping[str, Tensor]] = {}
    found: dict[int, Held] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        for held in weights_held(module):
            hooked[prefix] = held
        buffers = {} if changes_with_length(module) else module._buffers
        for own, tensor in (*module._parameters.items(), *buffers.items()):
            if tensor is None:
                continue
            read = partial(getattr, tensor, "data")
            if tensor.is_meta:  # read when it is hashed: all of them may not fit the memory
                read = partial(operator.getitem, *place_of(hooked, prefix + own))
            is_saved = own not in module._non_persistent_buffers_set
            found.setdefault(id(tensor), Held(is_saved, read)).names.append(plain_name(prefix + own))
    return list(found.values())


def weights_held(module: nn.Module) -> Iterator[Mapping[str, Tensor]]:
    """Yields the weights that a hook of accelerate puts into a module for a pass, by their names in the module."""
    hook = getattr(module, "_hf_hook", None)
    for each in (hook, *getattr(hook, "hooks", ())):
        if getattr(each, "weights_map", None) is not None:
            yield each.weights_map


def place_of(hooked: Mapping[str, Mapping[str, Tensor]], name: str) -> tuple[Mapping[str, Tensor], str]:
    """Returns the weights that have a tensor of the model, and its name among them.

    Args:
        hooked: weights of modules by the names of the modules, each with a dot at its end.
    """
    for prefix, held in hooked.items():
        own = name.removeprefix(prefix)
        if name.startswith(prefix) and own in held:
            return held, own
    raise ValueError(
        f"{name} is on the meta device, without numbers that would identify the model: load all weights into memory"
    )


def hash_of(held: Held) -> tuple[str, str]:
    """Returns the dtype of a tensor, and its shape with a hash of its numbers."""
    tensor = held.read()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return dtype, f"{list(tensor.shape)} {sha256_of_tensor(tensor)}"


def sha256_of_tensor(tensor: Tensor) -> str:
    """Returns the hash of the numbers of a tensor, of the parts of one of another class."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, facts = tensor.__tensor_flatten__()
        parts = [sha256_of_tensor(getattr(tensor, name)) for name in names]
        return sha256_text("\n".join((*names, repr(facts), *parts)))
    # As bytes, because numpy has no bfloat16.
    numbers = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(numbers.numpy()).hexdigest()
