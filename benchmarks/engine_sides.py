"""A side of `engines.py`: one engine with one kind of weights and cache, in a process and an environment of its own.

`engines.py` starts it with the side as JSON. It reads commands from standard input and answers on standard output, one
JSON object a line; what engines print goes to standard error.

| command | answer |
|---|---|
| (start) | version, seconds to load and of a first short text, MiB |
| `read`: ids, count, most | forgets all; seconds, CPU seconds, `count` tokens, the first after the prompt; MiB |
| `step`: count | the same of the next `count` tokens |
| `save`: file | seconds to write the state to a file |
| `turn`: ids, count, most, file | as `read`, of a longer text on the state kept, or on the one that `file` holds |
| `nll` | mean negative log probability in nats of the tokens of the first text: are the weights as in the file? |
Every engine greedily decodes token ids, and no token ends a text.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

TOP = 8
"""Logits kept of each step."""
BLOCK = 32
"""Tokens of a block of OpenVINO's cache on a CPU."""
TYPES = {"f16": 1, "q8_0": 8}
"""Types of a cache in llama.cpp, by its numbers."""
BATCH = 2048
"""Most tokens of a call of llama.cpp, and of a step of OpenVINO's scheduler."""

PIECE = 512
"""Tokens that llama.cpp computes at once, its default."""

Emit = Callable[[Any], None]


class Lacking(Exception):
    """This side cannot run here; says why."""


class Stopped(Exception):
    """The text is not to be continued; holds the next command."""

    def __init__(self, command: dict[str, Any]) -> None:
        super().__init__()
        self.command = command


class Engine(Protocol):
    """An engine that has loaded its weights."""

    version: str
    libraries: float
    """MiB resident before weights were loaded."""

    def clear(self) -> None:
        """Forgets the text."""

    def generate(self, ids: list[int], most: int, emit: Emit) -> None:
        """Reads what of the text is not kept, and calls `emit` with each of `most` tokens. `emit` may raise Stopped."""

    def save(self, file: str) -> None:
        """Writes the state to a file; raises Lacking if the engine cannot."""

    def load(self, file: str) -> None:
        """Replaces the state by the one of a file."""

    def logits(self) -> list[list[tuple[int, float]]]:
        """Returns the tokens of the highest logits, with these, of each token since the last call; empty where the
        engine does not give them.
        """

    def nll(self, ids: list[int]) -> float:
        """Returns the mean negative log probability of the ids after the first."""


# ---- engines ---------------------------------------------------------------------------------------------------------


class Transformers:
    """Transformers' `generate`, over its own cache or with a method of this package over a packed one."""

    def __init__(self, options: dict[str, Any]) -> None:
        import torch
        import transformers
        from transformers.generation import LogitsProcessor
        from transformers.generation.streamers import BaseStreamer

        class Recorder(LogitsProcessor):
            leaves_model = True

            def __init__(self) -> None:
                self.rows: list[torch.Tensor] = []

            def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
                self.rows.append(scores[0])
                return scores

        class Streamer(BaseStreamer):
            leaves_model = True

            def __init__(self, emit: Emit) -> None:
                self.emit = emit
                self.begun = False

            def put(self, value: torch.Tensor) -> None:
                if self.begun:
                    self.emit(value)
                self.begun = True  # the prompt comes first

            def end(self) -> None:
                pass

        torch.set_num_threads(options["threads"])
        self.torch = torch
        self.transformers = transformers
        self.options = options
        self.streamer = Streamer
        self.recorder = Recorder()
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        dtype = getattr(torch, options.get("dtype", "float32"))
        transformers.utils.logging.set_verbosity_error()
        self.libraries = status()["VmRSS"]
        self.model = self.loaded(dtype)
        self.model.generation_config.eos_token_id = None
        self.cache: Any = None

    def loaded(self, dtype: Any) -> Any:
        where = Path(self.options["model"])
        file = {"gguf_file": where.name} if where.is_file() else {"use_safetensors": True}
        where = where.parent if where.is_file() else where
        kind = self.transformers.AutoModelForCausalLM
        return kind.from_pretrained(where, dtype=dtype, local_files_only=True, **file).eval()

    def clear(self) -> None:
        self.cache = None
        gc.collect()

    def opened(self) -> Any:
        return self.transformers.DynamicCache(config=self.model.config)

    def loop(self, streamer: Any) -> dict[str, Any]:
        """Returns the arguments of `generate` that choose how to decode."""
        return {"streamer": streamer}

    def generate(self, ids: list[int], most: int, emit: Emit) -> None:
        if self.cache is None:
            self.cache = self.opened()
        text = self.torch.tensor([ids])
        options = self.loop(self.streamer(emit))
        with self.torch.no_grad():
            self.model.generate(
                text,
                attention_mask=self.torch.ones_like(text),
                past_key_values=self.cache,
                logits_processor=self.transformers.LogitsProcessorList([self.recorder]),
                do_sample=False,
                max_new_tokens=most,
                pad_token_id=0,
                **options,
            )

    def save(self, file: str) -> None:
        raise Lacking("this cache is not saved")

    load = save

    def logits(self) -> list[list[tuple[int, float]]]:
        tops = [row.topk(TOP) for row in self.recorder.rows]
        self.recorder.rows.clear()
        return [list(zip(top.indices.tolist(), top.values.tolist(), strict=True)) for top in tops]

    def nll(self, ids: list[int]) -> float:
        text = self.torch.tensor([ids])
        with self.torch.no_grad():
            logits = self.model(text, use_cache=False).logits[0, :-1].float()
        return self.torch.nn.functional.cross_entropy(logits, text[0, 1:]).item()


class ResidualMass(Transformers):
    """A method over a packed cache. Weights are float32, the codes of the file, or packed to `bits`; a step may be
    compiled.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        import residual_mass

        self.package = residual_mass
        super().__init__(options)
        self.version = f"residual_mass {residual_mass.__version__}, {self.version}"
        self.opened()  # raises ValueError without kernels

    def loaded(self, dtype: Any) -> Any:
        if self.options.get("codes"):
            return self.package.load_gguf(self.options["gguf"])[0]
        model = super().loaded(dtype)
        if self.options.get("bits"):
            self.package.pack_weights(model, bits=self.options["bits"])
            gc.collect()
        return model

    def opened(self) -> Any:
        return self.package.PackedCache(self.model, self.options["method"])

    def loop(self, streamer: Any) -> dict[str, Any]:
        settings = {name: self.options[name] for name in ("budget", "compile")} | {"streamer": streamer}
        return {"custom_generate": self.package.partial_decoding(self.options["method"], **settings)}

    def save(self, file: str) -> None:
        self.cache.save(file)

    def load(self, file: str) -> None:
        self.cache = self.opened().load(file)


class OpenVino:
    """OpenVINO GenAI's pipeline of continuous batching, which its LLMPipeline runs too, on the GGUF file."""

    def __init__(self, options: dict[str, Any]) -> None:
        import numpy as np
        import openvino
        import openvino_genai

        self.numpy = np
        self.openvino = openvino
        self.genai = openvino_genai
        self.version = f"openvino-genai {importlib.metadata.version('openvino-genai')}"
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks = options["room"] // BLOCK + 4
        scheduler.cache_size = 0
        scheduler.max_num_batched_tokens = BATCH
        scheduler.enable_prefix_caching = options["turns"]
        self.libraries = status()["VmRSS"]
        settings = {"INFERENCE_NUM_THREADS": options["threads"], "KV_CACHE_PRECISION": options["cache"]}
        settings |= options.get("settings", {})
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(options["gguf"], scheduler, "CPU", settings)
        self.requests = 0

    def clear(self) -> None:
        pass  # a request ends with its text

    def asked(self, ids: list[int], most: int, **more: Any) -> Any:
        """Returns a request for `most` tokens after the text, with further settings."""
        config = self.genai.GenerationConfig()
        settings = {"do_sample": False, "ignore_eos": True, "apply_chat_template": False}
        for name, value in (settings | {"max_new_tokens": most, "min_new_tokens": most} | more).items():
            setattr(config, name, value)
        text = self.openvino.Tensor(self.numpy.array([ids], dtype=self.numpy.int64))
        self.requests += 1
        return self.pipeline.add_request(self.requests, text, config)

    def generate(self, ids: list[int], most: int, emit: Emit) -> None:
        request = self.asked(ids, most)
        try:
            while self.pipeline.has_non_finished_requests():
                self.pipeline.step()
                while request.can_read():
                    for token in request.read()[0].generated_ids:
                        emit(token)
        except Stopped:
            request.cancel()
            while self.pipeline.has_non_finished_requests():
                self.pipeline.step()
            raise

    def save(self, file: str) -> None:
        raise Lacking("this cache is not saved")

    load = save

    def logits(self) -> list[list[tuple[int, float]]]:
        return []

    def nll(self, ids: list[int]) -> float:
        request = self.asked(ids, 1, echo=True, logprobs=1)
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        return -float(self.numpy.mean(request.read_all()[0].generated_log_probs[1 : len(ids)]))


class LlamaCpp:
    """llama.cpp, or its fork ik_llama.cpp, by the functions of its library."""

    def __init__(self, options: dict[str, Any]) -> None:
        import numpy as np

        self.numpy = np
        fork = options["engine"] == "ik_llama.cpp"
        self.api = importlib.import_module("ik_llama_cpp._ctypes_api" if fork else "llama_cpp")
        package = "ik-llama-cpp-python" if fork else "llama-cpp-python"
        self.version = f"{package} {importlib.metadata.version(package)}"
        api = self.api
        self.libraries = status()["VmRSS"]
        api.llama_backend_init()
        self.model = api.llama_model_load_from_file(options["gguf"].encode(), api.llama_model_default_params())
        settings = api.llama_context_default_params()
        settings.n_ctx = -(-options["room"] // 256) * 256
        settings.n_batch = BATCH
        self.piece = options.get("piece", PIECE)
        settings.n_ubatch = self.piece
        settings.n_threads = options["threads"]
        settings.n_threads_batch = options["threads"]
        settings.type_k = TYPES[options["cache"]]
        settings.type_v = TYPES[options["cache"]]
        if fork:
            settings.flash_attn = options["flash"]
        else:
            settings.flash_attn_type = int(options["flash"])
        self.context = api.llama_init_from_model(self.model, settings)
        if not self.context:
            raise Lacking("the library makes no context with these settings")
        self.vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.batch = api.llama_batch_init(BATCH, 0, 1)
        self.held = 0

    def clear(self) -> None:
        self.held = 0
        if hasattr(self.api, "llama_get_memory"):
            self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        else:
            self.api.llama_kv_cache_clear(self.context)

    def decode(self, ids: list[int], every: bool = False) -> None:
        """Reads up to BATCH tokens; their last logits are kept, or all."""
        self.batch.n_tokens = len(ids)
        for place, token in enumerate(ids):
            self.batch.token[place] = token
            self.batch.pos[place] = self.held + place
            self.batch.n_seq_id[place] = 1
            self.batch.seq_id[place][0] = 0
            self.batch.logits[place] = every or place == len(ids) - 1
        if self.api.llama_decode(self.context, self.batch) != 0:
            raise RuntimeError("llama_decode failed")
        self.held += len(ids)

    def logits_at(self, place: int) -> Any:
        """Returns the logits [V] after a token of the last call."""
        logits = self.api.llama_get_logits_ith(self.context, place)
        return self.numpy.ctypeslib.as_array(logits, (self.vocabulary,))

    def next(self, ids: list[int]) -> int:
        """Reads tokens; returns the one of the highest logit after them."""
        for start in range(0, len(ids), BATCH):
            piece = ids[start : start + BATCH]
            self.decode(piece)
        return int(self.logits_at(len(piece) - 1).argmax())

    def generate(self, ids: list[int], most: int, emit: Emit) -> None:
        unread = ids[self.held :]
        for _ in range(most):
            token = self.next(unread)
            emit(token)
            unread = [token]

    def save(self, file: str) -> None:
        raise Lacking("this cache is not saved")

    load = save

    def logits(self) -> list[list[tuple[int, float]]]:
        return []

    def nll(self, ids: list[int]) -> float:
        self.clear()
        bits = []
        for start in range(0, len(ids), self.piece):
            piece = ids[start : start + self.piece]
            self.decode(piece, every=True)
            for place, following in enumerate(ids[start + 1 : start + 1 + len(piece)]):
                logits = self.logits_at(place).astype(float)
                logits -= logits.max()
                bits.append(self.numpy.log(self.numpy.exp(logits).sum()) - logits[following])
        return float(self.numpy.mean(bits))


ENGINES: dict[str, Callable[[dict[str, Any]], Engine]] = {
    "residual_mass": ResidualMass,
    "transformers": Transformers,
    "openvino": OpenVino,
    "llama.cpp": LlamaCpp,
    "ik_llama.cpp": LlamaCpp,
}

# ---- commands --------------------------------------------------------------------------------------------------------


class Clock:
    """Takes the tokens of a text as they come, and waits for the next command whenever it has as many as were asked."""

    def __init__(self, engine: Engine, commands: Commands, count: int) -> None:
        self.engine = engine
        self.commands = commands
        self.wanted = count
        self.started()

    def started(self) -> None:
        self.seconds: list[float] = []
        self.tokens: list[int] = []
        self.cpu = time.process_time()
        self.since = time.perf_counter()

    def __call__(self, token: Any) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self.since)
        self.tokens.append(int(token))
        if len(self.tokens) == self.wanted:
            cpu = time.process_time() - self.cpu
            own = status()
            memory = {"resident": own["VmRSS"], "peak": own["VmHWM"]}
            answer = {"seconds": self.seconds, "cpu": cpu, "tokens": self.tokens, "top": self.engine.logits()}
            self.commands.answer(answer | {"memory": memory})
            command = self.commands.take()
            if command["do"] != "step":
                raise Stopped(command)
            self.wanted = command["count"]
            self.started()
        self.since = time.perf_counter()


class Commands:
    """Commands on standard input, answers on what was standard output."""

    def __init__(self) -> None:
        self.out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # libraries print there

    def answer(self, answer: dict[str, Any]) -> None:
        self.out.write(json.dumps(answer) + "\n")
        self.out.flush()

    def take(self) -> dict[str, Any]:
        line = sys.stdin.readline()
        return json.loads(line) if line else {"do": "end"}


def status() -> dict[str, float]:
    """Returns the fields of this process's memory in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines if line.startswith("Vm")}


def forget_peak() -> None:
    """Makes the peak of memory start again from what is resident, where the system allows it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def serve(engine: Engine, commands: Commands, first: list[int]) -> None:
    """Does what the commands ask until `end`."""
    command = commands.take()
    while command["do"] != "end":
        if command["do"] in ("read", "turn"):
            command = text(engine, commands, command)
            continue
        if command["do"] == "save":
            started = time.perf_counter()
            engine.save(command["file"])
            commands.answer({"seconds": time.perf_counter() - started})
        else:
            commands.answer({"nll": engine.nll(first)})
        command = commands.take()


def text(engine: Engine, commands: Commands, command: dict[str, Any]) -> dict[str, Any]:
    """Continues one text as long as the commands ask for more of it; returns the next other one."""
    if command["do"] == "read":
        engine.clear()
    clock = Clock(engine, commands, command["count"])
    if command.get("file"):
        engine.load(command["file"])
    try:
        engine.generate(command["ids"], command["most"], clock)
    except Stopped as stopped:
        return stopped.command
    raise RuntimeError(f"the engine ended the text before {command['most']} tokens")


def main() -> None:
    commands = Commands()
    options = json.loads(sys.argv[1])
    try:
        started = time.perf_counter()
        engine = ENGINES[options["engine"]](options)
        loaded = time.perf_counter()
        engine.generate(options["first"], 4, int)
        engine.clear()
        engine.logits()
        warm = time.perf_counter()
        before = status()
        forget_peak()
        memory = {"libraries": engine.libraries, "resident": before["VmRSS"], "peak_of_loading": before["VmHWM"]}
        about = {"load_seconds": loaded - started, "first_seconds": warm - loaded, **memory}
        commands.answer({"version": engine.version, **about})
        serve(engine, commands, options["first"])
    except (ImportError, Lacking) as reason:
        commands.answer({"lacking": str(reason)})
    except Exception as error:
        commands.answer({"lacking": f"{type(error).__name__}: {error}"})
        raise


if __name__ == "__main__":
    main()
