"""One compiled graph for a decode step: `torch.compile` over the forward pass of transformers' own model.

The model holds no state in a call of ours (`decode.text`), and its attention is one opaque operation
(`model.hook.attend`). So the graph stays the same while texts grow, over turns, methods and lengths. There is one for
each model, number of texts and number of threads. Inductor keeps what it compiled on disk, in TORCHINDUCTOR_CACHE_DIR.

Shape letters: B = batch rows, T = new tokens, V = vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
import types
import weakref
from pathlib import Path

import torch
import transformers
from torch import Tensor
from torch._inductor.runtime.cache_dir_utils import cache_dir
from transformers import Cache, PreTrainedModel

from residual_mass.kernels.cpu import compiler_refusal
from residual_mass.model.layers import device_of, text_config
from residual_mass.model.rotary import frequencies_of

REPAID = 6000
"""Tokens of a text that repay compilation: some 50 s for 30 layers, at some .3 ms a layer that a step then saves."""
REPAID_FROM_DISK = 1200
"""The same, of what is compiled already and is on disk: some 10 s."""
OPTIONS = {"size_asserts": False, "alignment_asserts": False}
"""Of inductor: our operation returns what its fake says, so that its checks of every tensor only cost time."""

log = logging.getLogger(__name__)
_steps: weakref.WeakKeyDictionary[PreTrainedModel, CompiledStep] = weakref.WeakKeyDictionary()


def compile_refusal(model: PreTrainedModel) -> str | None:
    """Returns why a model's step cannot be compiled here, in one line; None if nothing is known against it."""
    if device_of(model).type != "cpu":
        return "steps are compiled for CPUs alone"
    if getattr(text_config(model), "attn_temperature_tuning", False):
        return f"{type(model).__name__} looks up the number of tokens in its cache"
    if frequencies_of(model) is not None:
        return f"{type(model).__name__}'s rotary frequencies depend on the length of the text"
    return compiler_refusal()


def step_for(model: PreTrainedModel, compile: bool | str, batch: int, tokens: int) -> CompiledStep | None:
    """Returns what takes the steps of so many texts: the compiled step of the model, or None for the model itself.

    Args:
        compile: whether to compile; "auto" does if so many tokens repay it, or if it is done already.

    Raises:
        ValueError: `compile` is true, and the model cannot be compiled.
    """
    if compile is False:
        return None
    refusal = compile_refusal(model)
    if compile == "auto" and (refusal is not None or not _repaid(model, batch, tokens)):
        return None
    if refusal is not None:
        raise ValueError(f"compile=True is not possible: {refusal}; leave compile out")
    if model not in _steps:
        _steps[model] = CompiledStep()
    return _steps[model]


def _repaid(model: PreTrainedModel, batch: int, tokens: int) -> bool:
    if model in _steps and _steps[model].is_ready(batch):
        return True
    return tokens >= (REPAID_FROM_DISK if _record(model, batch).is_file() else REPAID)


class CompiledStep:
    """The call of one model for one new token of each of B texts, compiled when it is first called.

    Attributes:
        seconds: of the first call, in which a graph was compiled or read from disk, by B and number of threads.
    """

    def __init__(self) -> None:
        self.seconds: dict[tuple[int, int], float] = {}
        # Graphs are kept by code object, a few for each: a copy of it gives a model graphs of its own.
        own = types.FunctionType(logits_of.__code__.replace(), logits_of.__globals__)
        self._call = torch.compile(own, fullgraph=True, dynamic=False, options=OPTIONS)

    def __call__(self, model: PreTrainedModel, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Returns the logits [B, 1, V] after the tokens [B, 1]; arguments as for `logits_of`.

        Raises:
            TorchDynamoException: the model cannot be compiled; nothing was computed.
        """
        if self.is_ready(len(ids)):
            return self._call(model, ids, positions, mask, None, 1)
        log.warning("compiling the decode step of %s: up to a minute or two, once", type(model).__name__)
        started = time.perf_counter()
        logits = self._call(model, ids, positions, mask, None, 1)
        seconds = time.perf_counter() - started
        log.warning("compiled the decode step in %.0f s", seconds)
        self.seconds[len(ids), torch.get_num_threads()] = seconds
        record = _record(model, len(ids))
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps({"seconds": seconds}))
        return logits

    def is_ready(self, batch: int) -> bool:
        return (batch, torch.get_num_threads()) in self.seconds


def logits_of(
    model: PreTrainedModel, ids: Tensor, positions: Tensor, mask: Tensor, cache: Cache | None, keep: int
) -> Tensor:
    """Calls a model without a cache of keys and values.

    Args:
        ids, positions: [B, T].
        mask: [B, 1, 1, 1] bool, all True; with four dimensions it is passed on as it is: transformers makes none,
            and its size tells our attention in a compiled step that the call is of a text of ours.
        cache: what the model looks the number of tokens up in, if it does.
        keep: number of last tokens whose logits are computed; 0 means all.

    Returns:
        Logits [B, keep, V].
    """
    output = model(
        input_ids=ids,
        position_ids=positions,
        attention_mask=mask,
        past_key_values=cache,
        use_cache=False,
        logits_to_keep=keep,
        return_dict=True,
    )
    return output.logits


def _record(model: PreTrainedModel, batch: int) -> Path:
    """Returns the file which says that inductor's folder holds the step of a model of this shape."""
    parts = [text_config(model).to_json_string(), torch.__version__, transformers.__version__]
    parts += [str(batch), str(torch.get_num_threads())]
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        parts.append(f"{name} {tensor.dtype} {list(tensor.shape)}")
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return Path(cache_dir()) / "residual_mass" / f"{digest}.json"
