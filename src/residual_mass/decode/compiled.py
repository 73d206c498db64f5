"""One compiled graph for a decode step: `torch.compile` over the forward pass of transformers' own model.

The model holds no state in a call of ours (`decode.text`), and its attention is one opaque operation
(`model.hook.attend`). So the graph stays the same while texts grow, over turns, methods and lengths. There is one for
each model and `Key`. Inductor keeps what it compiled on disk, in TORCHINDUCTOR_CACHE_DIR.

A graph is of the model as it was. Torch's guards compare its modules, their attributes and tensors before a step, but
no hooks and no methods of classes: guards on hooks took .7 ms more a step of 30 layers. These are in the key.

Guards, and what fetches the model's tensors, take a sixth of a step of 30 layers. Where nothing runs between the steps
of a text that could change the model (`leaves_model`), they run in the first two, and later steps call at once what was
compiled.

Shape letters: B = batch rows, T = new tokens, V = vocabulary.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import logging
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.nn.modules import module as modules
from torch.utils.hooks import RemovableHandle
from transformers import Cache, PreTrainedModel

from residual_mass.decode.joined import JoinProducts
from residual_mass.decode.told import tell_once
from residual_mass.kernels.cpu import compiler_refusal
from residual_mass.model.layers import device_of, keeps_states, text_config
from residual_mass.model.rotary import frequencies_of

REPAID = 6000
"""Tokens of a text that repay compilation: some 50 s for 30 layers, at some .3 ms a layer that a step then saves."""
REPAID_FROM_DISK = 1200
"""The same, of what is compiled already and is on disk: some 10 s."""
MOST_GRAPHS = 16
"""Keys of a model whose graphs are kept, those that were used last."""

log = logging.getLogger(__name__)
_graphs: weakref.WeakKeyDictionary[PreTrainedModel, dict[Key, Graph]] = weakref.WeakKeyDictionary()
_keeping = threading.Lock()
"""Held while graphs are looked up, added and dropped."""
_calling = threading.local()
"""`step` is the `CompiledStep` whose graph is called, or made, in this thread; `last` its last `Call`."""


def compile_refusal(model: PreTrainedModel) -> str | None:
    """Returns why a model's step cannot be compiled here, in one line; None if nothing is known against it."""
    if device_of(model).type != "cpu":
        return "steps are compiled for CPUs alone"
    if keeps_states(model):
        return f"{type(model).__name__} keeps more of a text than keys and values, or takes more than tokens"
    if frequencies_of(model).change:
        return f"{type(model).__name__}'s rotary frequencies depend on the length of the text"
    return compiler_refusal()


def step_for(
    model: PreTrainedModel, compile: bool | str, batch: int, tokens: int, alone: bool = False
) -> CompiledStep | None:
    """Returns what takes the steps of so many texts: a compiled step of the model, or None for the model itself.

    Args:
        compile: whether to compile; "auto" does if so many tokens repay it, or takes a graph that there is.
        alone: of `CompiledStep`.

    Raises:
        ValueError: `compile` is true, and the model cannot be compiled.
    """
    if compile is False:
        return None
    refusal = compile_refusal(model)
    if compile is True:
        if refusal is not None:
            raise ValueError(f"compile=True is not possible: {refusal}; leave compile out")
        return CompiledStep(model, may_compile=True, alone=alone)
    if refusal is not None:
        if tokens >= REPAID and device_of(model).type == "cpu":
            tell_once(model, log, f"steps of {type(model).__name__} are not compiled: {refusal}")
        return None
    step = CompiledStep(model, may_compile=False, alone=alone)
    graph = step.graph(batch)
    # "auto" does not repeat a compilation that has failed; `compile=True` does.
    if graph.failed:
        return None
    step.may_compile = tokens >= REPAID or (tokens >= REPAID_FROM_DISK and _is_on_disk(model, batch))
    return step if graph.made or step.may_compile else None


def leaves_model(*parts: Any) -> bool:
    """Returns whether nothing but code of transformers and of this package runs in what is called between two steps:
    streamers, logits processors and stopping criteria. An attribute `leaves_model` that is true speaks for other code.
    """
    for part in parts:
        if part is not None and not getattr(part, "leaves_model", False):
            # A processor may hold a function of its user.
            held = filter(callable, getattr(part, "__dict__", {}).values())
            if not all(_is_ours(each) or inspect.isbuiltin(each) for each in (part, *held)):
                return False
    return True


def _is_ours(part: Any) -> bool:
    package = (getattr(part, "__module__", None) or "").partition(".")[0]
    return package in ("transformers", "residual_mass")


class Key(NamedTuple):
    """What a graph is for, besides what torch's guards compare.

    Attributes:
        hooks: of the model's modules, each as its place among them and the numbers of its handles, and of all modules.
        methods: the classes of the model's modules with their functions.
    """

    batch: int
    threads: int
    inference: bool
    hooks: tuple[Any, ...]
    methods: frozenset[Any]


class Graph:
    """The compiled call of a model for one key.

    Attributes:
        made: whether there is one, on its first call.
        failed: whether it could not be made when this was last tried.
    """

    def __init__(self) -> None:
        self.made = False
        self.failed = False

    @functools.cached_property
    def call(self) -> Callable[..., Tensor]:
        """Computes `_step_logits`; `torch.compile` already looks for inductor's folder, and may fail."""
        # Torch keeps graphs by code object, up to a limit: a copy of it gives a key graphs of its own.
        own = types.FunctionType(_step_logits.__code__.replace(), _step_logits.__globals__)
        return torch.compile(own, fullgraph=True, dynamic=False, backend=_compiled)


class Call(NamedTuple):
    """A call of what inductor compiled, by torch's guards: what they passed to it, and what it returned.

    Attributes:
        inputs: the model's tensors, and those of the step.
    """

    function: Callable[..., Sequence[Any]]
    inputs: tuple[Any, ...]
    outputs: Sequence[Any]

    def repeated(self, own: Sequence[Tensor], before: Call | None) -> Callable[..., Tensor] | None:
        """Returns a function of other tensors in place of `own` that computes what this call did; None if more than
        these differs from the call before, as in a model that keeps something of its last call.
        """
        # Found by identity: equal tensors can be inputs of different meaning.
        places = [[place for place, each in enumerate(self.inputs) if each is tensor] for tensor in own]
        if before is None or before.function is not self.function or len(self.outputs) != 1:
            return None
        others = set(range(len(self.inputs))).difference(*places)
        if any(self.inputs[place] is not before.inputs[place] for place in others):
            return None
        function = self.function
        inputs = self.inputs

        def again(*tensors: Tensor) -> Tensor:
            given = list(inputs)
            for at, tensor in zip(places, tensors, strict=True):
                for place in at:  # a graph that does not read a tensor has no such input
                    given[place] = tensor
            return function(*given)[0]

        return again


def _compiled(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Sequence[Any]]:
    """Compiles a graph as torch's own backend does, and notes its calls."""
    function = torch._inductor.compile(graph, inputs, options=options_here())

    def call(*given: Any) -> Sequence[Any]:
        outputs = function(*given)
        _calling.last = Call(function, given, outputs)
        return outputs

    return call


class CompiledStep:
    """The call of a model for one new token of each of B texts, from one prompt to the end of generation.

    Args:
        may_compile: whether to make a graph where there is none for the model as it is.
        alone: whether nothing that could change the model runs between steps, so that guards are evaluated in the first
            two alone.
    """

    def __init__(self, model: PreTrainedModel, may_compile: bool, alone: bool = False) -> None:
        self.model = model
        self.may_compile = may_compile
        self.alone = alone
        self._seen: tuple[Any, ...] = ()
        """What decides the key without a look at the modules, when the key was made last."""
        self._key: Key | None = None
        self._graph: Graph | None = None
        self._last: Call | None = None
        self._again: Callable[..., Tensor] | None = None
        """Calls what guards have called twice, while `_graph` and the mode of the thread stay."""
        self._began: float | None = None
        """When torch began to make a graph in the running call."""
        self._stale = False
        """Whether it had to make one in the running call, and must not."""

    def __call__(self, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Returns the logits [B, 1, V] after the tokens [B, 1]; arguments as for `logits_of`.

        Raises:
            Exception: whatever torch raises where a graph cannot be made. No attention was computed then.
        """
        graph = self.graph(len(ids))
        if self._again is not None:  # `graph` has dropped it if what decides the key has changed
            return self._again(ids, positions, mask)
        self._began = None
        _calling.step = self
        try:
            logits = graph.call(self.model, ids, positions, mask)
            if self.alone:
                self._again = _calling.last.repeated((ids, positions, mask), self._last)
                self._last = _calling.last
        finally:
            _calling.step = _calling.last = None  # `last` would keep the tensors of the call alive
        if self._began is not None:
            log.warning("compiled the decode step in %.0f s", time.perf_counter() - self._began)
            _write_record(self.model, len(ids), time.perf_counter() - self._began)
        graph.made = True
        graph.failed = False
        return logits

    def graph(self, batch: int) -> Graph:
        """Returns the graph for so many texts, the model as it is and the mode of the thread, made or not."""
        inference = torch.is_inference_mode_enabled()
        # The number of hooks that were ever registered tells whether there can be new ones.
        seen = (batch, torch.get_num_threads(), inference, RemovableHandle.next_id, torch.is_grad_enabled())
        # That number does not tell of removed hooks: a model that has any is always looked at.
        if self._graph is None or seen != self._seen or self._key.hooks:
            self._seen = seen
            self._last = self._again = None
            # Without the grad mode, which torch's guards compare.
            self._key = Key(*seen[:3], *_hooks_and_methods(self.model))
            self._graph = _kept_graph(self.model, self._key)
        return self._graph

    def begin(self) -> None:
        """Notes that torch makes a graph in the running call; raises ValueError if it must not."""
        if not self.may_compile:
            self._stale = True
            raise ValueError("the model, or the mode of the call, is another than the graph is for")
        if self._began is None:
            log.warning("compiling the decode step of %s: up to a minute or two, once", type(self.model).__name__)
            self._began = time.perf_counter()

    def give_up(self, error: Exception) -> None:
        """Says in one line why the steps of this text are not compiled."""
        name = type(self.model).__name__
        if self._stale:
            changed = f"{name} has changed since its step was compiled, or is called in another mode"
            tell_once(self.model, log, f"{changed}: steps run as they are; compile=True compiles it anew")
            return
        with _keeping:  # what is tried again begins without the graphs of before, and below torch's limit
            _graphs[self.model][self._key] = Graph()
            _graphs[self.model][self._key].failed = True
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(f"steps of {name} are not compiled: {reason}", stacklevel=3)


def _kept_graph(model: PreTrainedModel, key: Key) -> Graph:
    """Returns the graph of a key, which is the last one used then; drops the first one of too many."""
    with _keeping:
        graphs = _graphs.setdefault(model, {})
        graph = graphs.pop(key, None) or Graph()
        graphs[key] = graph
        if len(graphs) > MOST_GRAPHS:
            del graphs[next(iter(graphs))]
    return graph


def _hooks_and_methods(model: PreTrainedModel) -> tuple[tuple[Any, ...], frozenset[Any]]:
    """Returns `Key.hooks` and `Key.methods`."""
    hooks: list[tuple[Any, ...]] = []
    kinds = set()
    held = (modules._global_forward_pre_hooks, modules._global_forward_hooks)
    for place, module in enumerate((None, *model.modules())):  # None is for the hooks of all modules
        if module is not None:
            kinds.add(type(module))
            held = (module._forward_pre_hooks, module._forward_hooks)
        if any(held):
            hooks.append((place, *map(tuple, held)))
    # Torch replaces methods of `Module` itself when it begins to compile.
    bases = {base for kind in kinds for base in kind.__mro__} - {modules.Module}
    # Functions are compared by identity: a method that was replaced gives another key.
    methods = [(base, *filter(inspect.isfunction, vars(base).values())) for base in bases]
    return tuple(hooks), frozenset(methods)


def _step_logits(model: PreTrainedModel, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        _begin()
    return logits_of(model, ids, positions, mask, None, 1)


@torch.compiler.assume_constant_result  # so that it runs where a graph is made, and is not in the graph
def _begin() -> None:
    _calling.step.begin()


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


def options_here() -> dict[str, Any]:
    """Returns options of inductor for this CPU, with our pass over its graph.

    Our operation returns what its fake says, so that inductor's checks of every tensor only cost time. The width of
    vectors is what inductor would choose by itself; named, it is a part of the key under which a graph is on disk.
    Without it, a folder that CPUs share gives one of them the loops of another, and other numbers.
    """
    instructions = pick_vec_isa()
    bits = instructions.bit_width() if instructions else 1
    asserts = {"size_asserts": False, "alignment_asserts": False}
    return asserts | {"cpp.simdlen": bits, "post_grad_custom_pre_pass": JoinProducts()}


def _record(model: PreTrainedModel, batch: int) -> Path:
    """Returns the file which says that inductor's folder holds the step of a model of this shape.

    Raises:
        OSError: there is no folder, and it cannot be made.
    """
    parts = [text_config(model).to_json_string(), torch.__version__, transformers.__version__]
    parts += [str(batch), str(torch.get_num_threads()), str(torch.is_inference_mode_enabled()), str(options_here())]
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        parts.append(f"{name} {tensor.dtype} {list(tensor.shape)}")
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return Path(cache_dir()) / "residual_mass" / f"{digest}.json"


def _is_on_disk(model: PreTrainedModel, batch: int) -> bool:
    try:
        return _record(model, batch).is_file()
    except OSError:
        return False


def _write_record(model: PreTrainedModel, batch: int, seconds: float) -> None:
    try:
        record = _record(model, batch)
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps({"seconds": seconds}))
    except OSError as error:
        log.warning("the compiled step is not noted on disk: %s", error)
