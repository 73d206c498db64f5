"""Trains feature maps of one backbone at one length, in one or several variants.

A step takes one teacher pass per sequence (new, or replayed from a pool), samples query positions, runs every layer's
maps forward and backward separately, and then does one AdamW update. Variants differ in maps and objectives and share
everything else, above all the teacher pass. Each gets the same maps as if it were trained alone. Several
processes split a step's sequences and add up their gradients.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from residual_mass.files import csv_text, locked, remove_leftovers, sha256_text, write_text
from residual_mass.model.loading import Backbone, load_backbone
from residual_mass.model.phi_maps import read_safetensors, write_safetensors
from residual_mass.provenance import Record
from residual_mass.spec.paths import MANIFEST
from residual_mass.spec.sections import ReplaySpec
from residual_mass.spec.settings import to_json, tokens_of
from residual_mass.spec.specs import TrainSpec
from residual_mass.spec.texts import HUB
from residual_mass.texts.corpora import Cycle, training_corpus
from residual_mass.texts.hub import commits_of
from residual_mass.training.learner import (
    MEASURES,
    HeldOut,
    Learner,
    held_out_packs,
    held_out_rows,
    positive_random_features,
)
from residual_mass.training.teacher import FreshPasses, LayerTrace, ReplayedPasses

log = logging.getLogger(__name__)

RUN_COLUMNS = ("recipe", "variant", "seed")
"""Columns of the log that identify a training."""
LOG_COLUMNS = (*RUN_COLUMNS, "step", "seconds", "corpus", "k", "layer", *MEASURES)
SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Sent by batch systems before they kill a job, and by Ctrl-C."""
CHECKPOINT_HEADER = "residual_mass_checkpoint"
CHECKPOINT_DIGEST = "residual_mass_digest"


def run(spec: TrainSpec, assets: Path, checkpoint: Path, out: Sequence[Path], log_csv: Path) -> None:
    """The `train` stage: writes each variant's maps with a provenance sidecar, and updates the held-out log.

    Args:
        out: files of the maps, in the order of `spec.variants`.

    Raises:
        ValueError: the spec cannot be trained here, or a loss or gradient is not finite (names the key or the place),
            or another job uses this checkpoint.
    """
    record = Record("train", spec, [assets / MANIFEST])
    if len(out) != len(spec.variants):
        raise ValueError(f"--out has {len(out)} files, but spec.variants has {len(spec.variants)}; give one for each")
    # The leader alone locks: others of its group would find the lock taken.
    with processes() as group, locked(checkpoint) if group.leads else nullcontext():
        length = tokens_of(spec.length)
        count = spec.sequences_per_step
        if count % group.world:
            raise ValueError(f"phi.sequences_per_step ({count}) must be a multiple of the {group.world} processes")
        backbone = load_backbone(spec.backbone, assets, group.device)
        corpora = {}
        # What a slot reads depends on its number, not on the process that reads it.
        for slot in range(group.rank, count, group.world):
            corpora[slot] = training_corpus(spec.corpora, backbone.tokenizer, length, spec.seed, assets, slot, count)
        held_out = held_out_packs(spec, backbone, assets) if group.leads else {}
        trainer = Trainer(spec, backbone, corpora, held_out, group)
        labels = ", ".join(variant.label for variant in spec.variants)
        where = f"{backbone.device}, {group.world} processes"
        log.info("training phi (%s) of %s at %d tokens on %s", labels, spec.backbone.model_id, length, where)
        trainer.resume(checkpoint)
        trainer.train(checkpoint, log_csv)
        if not group.leads:
            return
        texts = (*spec.corpora, *spec.held_out)
        how = {
            "device": backbone.device,
            "processes": group.world,
            "identity": backbone.identity,
            "steps": spec.steps,
            "data_sets": commits_of([HUB[name] for name in texts if name in HUB]),
        }
        for learner, path in zip(trainer.learners, out, strict=True):
            learner.maps.save(path)
            record.write(path, seconds=trainer.seconds_of(learner), **how)
        record.write(log_csv, seconds=trainer.seconds, **how)
        # Last: a job that is killed between its outputs can still resume.
        checkpoint.unlink(missing_ok=True)
        remove_leftovers(checkpoint)


class Processes(NamedTuple):
    """This process in the group that torchrun started; a group of one without torchrun."""

    rank: int = 0
    world: int = 1
    device: torch.device | None = None
    """Its GPU; None without GPUs or with a single process."""

    @property
    def leads(self) -> bool:
        """Whether this process evaluates, logs and writes."""
        return self.rank == 0

    @torch.no_grad()
    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replaces tensors by their sums over the processes, in one all-reduce."""
        if self.world > 1:
            flat = torch.cat([x.flatten() for x in tensors])
            dist.all_reduce(flat)
            totals = flat.split([x.numel() for x in tensors])
            for x, total in zip(tensors, totals, strict=True):
                x.copy_(total.view_as(x))


ALONE = Processes()


@contextmanager
def processes() -> Iterator[Processes]:
    """Joins the process group if torchrun set one up, and leaves it on exit."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield ALONE
        return
    device = None
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device is None else "nccl")
    yield Processes(dist.get_rank(), dist.get_world_size(), device)
    dist.destroy_process_group()  # not after an error: it might deadlock with processes that wait for this one


class StopSignals:
    """Context that defers `SIGNALS`. Several signals count as one, because torchrun repeats those that a batch system
    sends to all processes.

    Attributes:
        asked: the first signal that arrived; None so far.
    """

    asked: int | None = None

    def __enter__(self) -> StopSignals:
        self.asked = None
        self._handlers = {}
        for number in SIGNALS:
            # A signal that the parent has set to be ignored, as shells do for background jobs, stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def take_effect(self) -> None:
        """Raises the signal with its original handler; SIGTERM if only another process received one."""
        number = self.asked or signal.SIGTERM
        handler = self._handlers.get(number, signal.SIG_DFL)
        signal.signal(number, handler)
        signal.raise_signal(number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = self.asked or number


class Trainer:
    """The variants, the passes they share, and the log.

    Attributes:
        step: number of finished steps.
        log_rows: rows of the log so far.
        seconds: training time of all variants together, without evaluations.
    """

    def __init__(
        self,
        spec: TrainSpec,
        backbone: Backbone,
        corpora: dict[int, Cycle],
        held_out: HeldOut,
        group: Processes = ALONE,
    ):
        """`corpora` are those of this process's sequences, by the index of the sequence in a step."""
        self.spec = spec
        self.backbone = backbone
        self.held_out = held_out
        self.group = group
        # With pool and reuse 1 no pass is used twice: traces need not be recorded.
        kind = FreshPasses if spec.replay == ReplaySpec(pool=1, reuse=1) else ReplayedPasses
        self.passes = {slot: kind(spec, backbone, corpus, slot) for slot, corpus in corpora.items()}
        self.step = 0
        self.log_rows: list[dict[str, Any]] = []
        self.seconds = 0.0
        self.spec_hash = sha256_text(to_json(spec) + backbone.identity)
        self.stop = StopSignals()
        self.learners = []
        for variant in spec.variants:
            self.learners.append(Learner(spec, variant, backbone.shape, backbone.device))

    def train(self, checkpoint: Path, log_csv: Path) -> None:
        """Runs to the last step, with progress on stderr and held-out errors in `log_csv`.

        SIGTERM and SIGINT take effect at the end of the current or the next step, after a checkpoint.
        """
        spec = self.spec
        if self.step == 0:
            self.initialise()
            self._evaluate(log_csv)
        elif self.group.leads:
            self._write_log(log_csv)  # Snakemake deleted it when the job was interrupted
        progress = tqdm(
            total=spec.steps,
            initial=self.step,
            desc="train phi",
            unit="step",
            mininterval=2,
            disable=not self.group.leads,
        )
        with self.stop, progress as bar:
            while self.step < spec.steps:
                loss, stopping = self._update(checkpoint)
                bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
                bar.update()
                if self.step % spec.eval_every == 0 or self.step == spec.steps:
                    self._evaluate(log_csv)
                if self.step % spec.checkpoint_every == 0 or stopping:
                    self.save_checkpoint(checkpoint)
                if stopping:
                    log.info("stopped after step %d; its checkpoint is %s", self.step, checkpoint)
                    self.stop.take_effect()

    def seconds_of(self, learner: Learner) -> float:
        """Returns one variant's training time as if trained alone, without the other variants' own seconds."""
        others = [other for other in self.learners if other is not learner]
        return self.seconds - sum(other.seconds for other in others)

    def initialise(self) -> None:
        """Initialises the maps of every variant; all processes take those of the leading one."""
        started = time.perf_counter()
        spec = self.spec
        maps = [learner.maps for learner in self.learners]
        calibrated = [phi for phi in maps if phi.map.init == "positive_random_features"]
        if calibrated:
            # Processes calibrate on texts of their own; the broadcast below replaces what the others find.
            passes = next(iter(self.passes.values()))
            traces = passes.first()
            for phi in calibrated:
                positive_random_features(phi, traces, spec.anchors, spec.eval_budgets, spec.seed)
        if self.group.world > 1:
            for phi in maps:
                for parameter in phi.parameters():
                    dist.broadcast(parameter.data, 0)
        self.seconds += time.perf_counter() - started

    def _update(self, checkpoint: Path) -> tuple[float, bool]:
        """Does one step of every variant. Returns the mean loss of the first variant over this process's sequences, and
        whether all processes stop now.
        """
        started = time.perf_counter()

        def backward(layer: int, trace: LayerTrace) -> None:
            for learner in self.learners:
                learner.backward(layer, trace)

        seconds = sum(passes.run(self.step, backward) for passes in self.passes.values())
        worked = [sum(learner.worked) for learner in self.learners]
        for learner, own in zip(self.learners, worked, strict=True):
            # `worked` adds up over parallel layers: a learner gets its share of the wall time instead.
            learner.seconds += seconds * own / sum(worked)
            gradients = [p.grad for p in learner.maps.parameters() if p.grad is not None]
            # The sum is the mean: `Learner.backward` divides by the sequences of all processes.
            self.group.add_up(gradients)
        stopping = self._require_finite(checkpoint)
        # Losses are divided by the sequences of all processes, of which this one has 1 / world.
        loss = self.learners[0].losses.mean().item() * self.group.world
        for learner in self.learners:
            learner.update(self.step)
        self.step += 1
        self.seconds += time.perf_counter() - started
        return loss, stopping

    def _require_finite(self, checkpoint: Path) -> bool:
        """Raises ValueError for a loss or gradient that is not finite, before the update, so that maps and checkpoints
        never hold a NaN. Returns whether any process received a stop signal, summed in the same all-reduce.
        """
        problems = {learner.label: learner.problem() for learner in self.learners}
        failed_here = any(problems.values())
        stopping_here = self.stop.asked is not None
        flags = torch.tensor([failed_here, stopping_here], device=self.backbone.device).float()
        # No process may raise before this sum: the others would wait for it forever.
        self.group.add_up([flags])
        failed, stopping = (flags > 0).tolist()
        if not failed:
            return stopping
        for label, problem in problems.items():
            if problem is not None:
                kept = "no checkpoint yet"
                if checkpoint.exists():
                    kept = f"the last checkpoint, {checkpoint}, is kept"
                raise ValueError(f"{label}: {problem}, step {self.step} ({kept}); lower phi.learning_rate")
        raise ValueError(f"process {self.group.rank}: another process stopped at step {self.step} and says why")

    def _evaluate(self, log_csv: Path) -> None:
        """Measures every variant on the held-out texts and writes the whole log."""
        if not self.group.leads:
            return
        rows: list[dict[str, Any]] = []
        for learner in self.learners:
            identity = {
                "recipe": self.spec.name,
                "variant": learner.label,
                "seed": self.spec.seed,
                "step": self.step,
                "seconds": f"{self.seconds_of(learner):.1f}",
            }
            for corpus, packs in self.held_out.items():
                for row in held_out_rows(learner.maps, packs, self.spec):
                    rows.append(identity | {"corpus": corpus} | row)
        for row in rows:
            if row["layer"] == "all":
                log.info(
                    "%(variant)s, step %(step)d, %(corpus)s, K = %(k)d: e_topk %(e_topk)s e_sub %(e_sub)s "
                    "e_nosub %(e_nosub)s KL %(kl)s log-Z %(log_z_error)s",
                    row,
                )
        self.log_rows += rows
        self._write_log(log_csv)

    def _write_log(self, log_csv: Path) -> None:
        text = csv_text(LOG_COLUMNS, self.log_rows)
        write_text(log_csv, text)

    def save_checkpoint(self, path: Path) -> None:
        """Writes the state from which a run continues as if uninterrupted.

        All processes wait for the file: torchrun kills the one that writes it 30 s after another one exits.
        """
        if self.group.leads:
            tensors: dict[str, Tensor] = {}
            for learner in self.learners:
                tensors |= learner.state()
            progress = {
                "step": self.step,
                "spec": self.spec_hash,
                "log": self.log_rows,
                "seconds": self.seconds,
                "own_seconds": [learner.seconds for learner in self.learners],
            }
            write_checkpoint(path, progress, tensors)
        if self.group.world > 1:
            dist.barrier()

    def resume(self, path: Path) -> None:
        """Continues from a checkpoint of the same spec; logs and ignores one of another spec.

        Raises:
            ValueError: the checkpoint is damaged; names it.
        """
        if not path.exists():
            return
        progress, tensors = read_checkpoint(path)
        if progress["spec"] != self.spec_hash:
            log.info("%s belongs to another spec and is ignored", path)
            return
        self.step = progress["step"]
        self.log_rows = progress["log"]
        self.seconds = progress["seconds"]
        for learner, seconds in zip(self.learners, progress["own_seconds"], strict=True):
            learner.restore(tensors, self.step)
            learner.seconds = seconds
        log.info("resumed from %s at step %d", path, self.step)


def write_checkpoint(path: Path, progress: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes the file atomically; raises OSError naming it on failure."""
    header = json.dumps(progress)
    on_cpu = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    metadata = {CHECKPOINT_HEADER: header, CHECKPOINT_DIGEST: _digest(header, on_cpu)}
    write_safetensors(path, on_cpu, metadata)


def read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Reads what `write_checkpoint` wrote.

    Raises:
        ValueError: the file is damaged; names it.
    """
    metadata, tensors = read_safetensors(path)
    header = metadata.get(CHECKPOINT_HEADER, "")
    if metadata.get(CHECKPOINT_DIGEST) != _digest(header, tensors):
        raise ValueError(f"{path}: damaged checkpoint; delete it to train from the beginning")
    return json.loads(header), tensors


def _digest(header: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(header.encode())
    # A file need not return its tensors in the order in which they were written.
    for name in sorted(tensors):
        digest.update(name.encode())
        numbers = tensors[name].contiguous().flatten()
        digest.update(numbers.view(torch.uint8).numpy())
    return digest.hexdigest()
