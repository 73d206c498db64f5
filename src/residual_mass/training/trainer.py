"""Trains feature maps of one backbone at one length, in as many variants as are asked for.

A step takes one teacher pass (new, or replayed from a pool), samples query positions, and runs every layer's maps
forward and backward on their own; then one AdamW update. Variants differ in their maps and objectives and share
everything else, the teacher pass first of all; each ends up as if it had been trained alone. All randomness is a
function of (seed, step), so a resumed run is the undisturbed run.

Shape letters: Hkv = KV heads, G = query heads of a KV head, Q = query positions of the step, L = visible keys.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from residual_mass.backbones.corpora import Corpus, held_out_corpus, training_corpus
from residual_mass.backbones.loading import Backbone, load_backbone
from residual_mass.backbones.measured import layer_measures
from residual_mass.backbones.phi_maps import PhiMaps, read_safetensors
from residual_mass.core import objectives
from residual_mass.core.accounting import attention_scores
from residual_mass.core.feature_maps import log_kernel
from residual_mass.core.support import retrieved_count
from residual_mass.files import replacing, sha256_text, write_meta, write_text
from residual_mass.specs import AnchorSpec, ObjectiveSpec, ReplaySpec, TrainSpec, VariantSpec, to_json, tokens_of
from residual_mass.training.initialise import positive_random_features
from residual_mass.training.teacher import LayerTrace, record_traces, stream_traces

log = logging.getLogger(__name__)

HELD_OUT = "wiki"
"""Text that progress is measured on; needs the assets."""
HELD_OUT_PACKS, HELD_OUT_QUERIES = 2, 4
LOG_COLUMNS = "variant,step,k,e_topk,e_sub,e_nosub,log_z_error"
READ_VALUES = ("lolcats", "residual")
"""Objectives that need the values, which are kept with a teacher pass only for them."""
MOMENTS = ("exp_avg", "exp_avg_sq")
Traces = list[LayerTrace]
"""Every layer's trace of one teacher pass."""


def run(spec: TrainSpec, assets: Path, checkpoint: Path, outs: Sequence[Path], log_csv: Path) -> None:
    """The `train` stage: writes each variant's maps with a provenance sidecar, and the held-out log.

    Args:
        outs: files of the maps, in the order of `spec.variants`.
    """
    length = tokens_of(spec.length)
    if length > spec.backbone.context:
        raise ValueError(
            f"length {spec.length}: longer than the context of {spec.backbone.name} ({spec.backbone.context})"
        )
    if len(outs) != len(spec.variants):
        raise ValueError(f"--out has {len(outs)} files, but spec.variants has {len(spec.variants)}; give one for each")
    backbone = load_backbone(spec.backbone, assets)
    corpus = training_corpus(spec.corpora, backbone.tokenizer, length, spec.seed, assets)
    trainer = Trainer(spec, backbone, corpus, _held_out_packs(spec, backbone, assets))
    labels = ", ".join(variant.label for variant in spec.variants)
    log.info("training phi (%s) of %s at %d tokens on %s", labels, spec.backbone.model_id, length, backbone.device)
    trainer.resume(checkpoint)
    started, first = time.monotonic(), trainer.step
    trainer.train(checkpoint)
    ran = {"steps": spec.steps - first, "seconds": time.monotonic() - started}
    for learner, out in zip(trainer.learners, outs, strict=True):
        learner.maps.save(out)
        write_meta(out, spec=asdict(spec), device=str(backbone.device), identity=backbone.identity, **ran)
    write_text(log_csv, "\n".join([LOG_COLUMNS, *trainer.log_rows]) + "\n")
    checkpoint.unlink(missing_ok=True)


class Learner:
    """One variant: its maps and their optimiser."""

    def __init__(self, spec: TrainSpec, variant: VariantSpec, backbone: Backbone, first_pass: Callable[[], Traces]):
        self.label, self.objective = variant.label, variant.objective
        self.anchors, self.budgets = spec.anchors, spec.eval_budgets
        torch.manual_seed(spec.seed)
        self.maps = PhiMaps(backbone.shape, variant.map, _facts(spec, variant)).to(backbone.device)
        if variant.map.init == "positive_random_features":
            positive_random_features(self.maps, first_pass(), spec.seed)
        self.optimiser = torch.optim.AdamW(
            self.maps.parameters(), lr=spec.learning_rate, weight_decay=spec.weight_decay, fused=True
        )

    def backward(self, layer: int, trace: LayerTrace, step: int) -> float:
        loss = layer_loss(self.maps, layer, trace, self.objective, self.anchors, self.budgets)
        if not torch.isfinite(loss):
            where = f"layer {layer} at step {step}"
            raise ValueError(f"{self.label}: loss is {loss.item()} in {where}; the last checkpoint is kept")
        loss.backward()
        return loss.item()

    def update(self, rate: float) -> None:
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Parameters and moments, for a checkpoint."""
        tensors = {}
        for name, parameter in self.maps.named_parameters():
            tensors[f"{self.label}/parameter.{name}"] = parameter.detach()
            for key in MOMENTS:
                tensors[f"{self.label}/{key}.{name}"] = self.optimiser.state[parameter][key]
        return tensors

    def restore(self, tensors: dict[str, Tensor], step: int) -> None:
        for name, parameter in self.maps.named_parameters():
            parameter.data.copy_(tensors[f"{self.label}/parameter.{name}"])
            moments = {key: tensors[f"{self.label}/{key}.{name}"].to(parameter.device) for key in MOMENTS}
            self.optimiser.state[parameter] = {"step": torch.tensor(float(step), device=parameter.device), **moments}


class Trainer:
    """The variants, and the pool of teacher passes by index that they share."""

    def __init__(self, spec: TrainSpec, backbone: Backbone, corpus: Corpus, held_out: list[Traces]):
        self.spec, self.backbone, self.corpus, self.held_out = spec, backbone, corpus, held_out
        self.length = tokens_of(spec.length)
        self.step, self.log_rows = 0, []
        self.pool: dict[int, Traces] = {}
        self.learners = [Learner(spec, variant, backbone, lambda: self._kept(0)) for variant in spec.variants]
        self._forget_unless_replayed()

    def train(self, checkpoint: Path | None = None) -> None:
        """Runs to the last step; progress goes to stderr, held-out errors to `log_rows`."""
        bar = tqdm(total=self.spec.steps, initial=self.step, desc="train phi", unit="step", mininterval=2)
        started, first = time.monotonic(), self.step
        while self.step < self.spec.steps:
            loss = self._update()
            self.step += 1
            rate = self.length * (self.step - first) / (time.monotonic() - started)
            bar.set_postfix_str(f"loss {loss:.3f}, {rate:.0f} tokens/s", refresh=False)
            bar.update()
            if self.step % self.spec.eval_every == 0 or self.step == self.spec.steps:
                self._log_held_out()
            if checkpoint is not None and self.step % self.spec.checkpoint_every == 0:
                self.save_checkpoint(checkpoint)
        bar.close()

    def _update(self) -> float:
        """One step of every variant; the mean loss of the first one over the layers."""
        losses: list[list[float]] = [[] for _ in self.learners]

        def backward(layer: int, trace: LayerTrace) -> None:
            for learner, of_learner in zip(self.learners, losses, strict=True):
                of_learner.append(learner.backward(layer, trace, self.step))

        if self._replays():
            traces = self._replayed()
            rng = torch.Generator().manual_seed(_seed(self.spec.seed, "queries", self.step))
            chosen = torch.randperm(len(traces[0].positions), generator=rng)[: self.spec.queries_per_step]
            for layer, trace in enumerate(traces):
                backward(layer, trace.at(chosen))
        else:
            # Nothing is kept: every layer trains the moment the teacher reaches it, and its keys are gone after that.
            positions = self._positions(self.step, self.spec.queries_per_step)
            stream_traces(self.backbone, self.corpus.sequence(self.step), positions, backward)
        for learner in self.learners:
            learner.update(learning_rate(self.spec, self.step))
        return sum(losses[0]) / len(losses[0])

    def _replays(self) -> bool:
        return self.spec.replay != ReplaySpec(pool=1, reuse=1)

    def _replayed(self) -> Traces:
        """A random pass of the pool, which holds the newest passes; after a resume the missing ones are made again."""
        newest = self.step // self.spec.replay.reuse
        wanted = range(max(0, newest - self.spec.replay.pool + 1), newest + 1)
        self.pool = {index: self._kept(index) for index in wanted}
        return self.pool[random.Random(_seed(self.spec.seed, "pass", self.step)).choice(wanted)]

    def _kept(self, index: int) -> Traces:
        """A pass of the pool, made if it is not there."""
        if index not in self.pool:
            count = self.spec.queries_per_step * self.spec.replay.reuse
            keep_values = any(variant.objective.name in READ_VALUES for variant in self.spec.variants)
            sequence, positions = self.corpus.sequence(index), self._positions(index, count)
            self.pool[index] = record_traces(self.backbone, sequence, positions, keep_values)
        return self.pool[index]

    def _forget_unless_replayed(self) -> None:
        if not self._replays():
            self.pool.clear()

    def _positions(self, index: int, count: int) -> Tensor:
        """Distinct query positions of a pass, uniform over the final share of the sequence."""
        window = min(self.length, round(self.length * self.spec.query_window))
        rng = torch.Generator().manual_seed(_seed(self.spec.seed, "positions", index))
        return (torch.randperm(window, generator=rng)[:count] + self.length - window).to(self.backbone.device)

    def _log_held_out(self) -> None:
        anchors = self.spec.anchors
        for learner in self.learners:
            for budget in self.spec.eval_budgets:
                k = retrieved_count(budget, self.length, anchors.sink + anchors.tail)
                errors = held_out_errors(learner.maps, self.held_out, k, anchors)
                self.log_rows.append(f"{learner.label},{self.step},{k},{','.join(f'{value:.6f}' for value in errors)}")
                log.info(
                    "%s, step %d, K = %d: e_topk %.4f e_sub %.4f e_nosub %.4f log-Z %+.3f",
                    learner.label, self.step, k, *errors,
                )  # fmt: skip

    def save_checkpoint(self, path: Path) -> None:
        tensors = {name: tensor for learner in self.learners for name, tensor in learner.state().items()}
        header = {"step": str(self.step), "spec": self._spec_hash(), "log": json.dumps(self.log_rows)}
        with replacing(path) as temporary:
            save_file({name: t.cpu().contiguous() for name, t in tensors.items()}, temporary, metadata=header)

    def resume(self, path: Path) -> None:
        """Continues from a checkpoint of the same spec; one of another spec is ignored, saying so."""
        if not path.exists():
            return
        header, tensors = read_safetensors(path)
        if header.get("spec") != self._spec_hash():
            log.info("%s belongs to another spec and is ignored", path)
            return
        self.step, self.log_rows = int(header["step"]), json.loads(header["log"])
        for learner in self.learners:
            learner.restore(tensors, self.step)
        log.info("resumed from %s at step %d", path, self.step)

    def _spec_hash(self) -> str:
        return sha256_text(to_json(self.spec) + self.backbone.identity)


def _facts(spec: TrainSpec, variant: VariantSpec) -> dict[str, object]:
    """What the maps' file says of their training: nothing of the other variants, which leave no mark on these maps."""
    recipe = json.loads(to_json(dataclasses.replace(spec, variants=(variant,))))
    backbone = spec.backbone
    return {
        "model_id": backbone.model_id,
        "revision": backbone.revision,
        "length": tokens_of(spec.length),
        "recipe": recipe,
    }


def layer_loss(
    maps: PhiMaps,
    layer: int,
    trace: LayerTrace,
    spec: ObjectiveSpec,
    anchors: AnchorSpec,
    budgets: Sequence[float],
) -> Tensor:
    """Objective of one layer's maps on one trace, averaged over its query heads and positions.

    Args:
        anchors, budgets: the supports of the objective `residual`, as shares of what each query sees.
    """
    keys = trace.keys[:, : int(trace.positions.max()) + 1]
    group = trace.queries.shape[0] // keys.shape[0]
    queries = trace.queries.unflatten(0, (-1, group)).flatten(1, 2)  # [Hkv, G * Q, D]
    log_query = maps.query[layer](trace.queries).unflatten(0, (-1, group)).flatten(1, 2)
    student = log_kernel(log_query, maps.key[layer](keys))
    visible = torch.arange(keys.shape[1], device=keys.device) <= trace.positions.repeat(group).unsqueeze(-1)
    scores = attention_scores(queries, keys, trace.scale)
    if spec.name == "lolcats":
        x = objectives.shifted(scores, student, visible)
        return objectives.lolcats_term(x, trace.values[:, : keys.shape[1]])
    if spec.name == "residual":
        last = trace.positions.repeat(group)  # the last key that a row sees
        columns = torch.arange(keys.shape[1], device=keys.device)
        mid = (columns >= anchors.sink) & (columns <= last.unsqueeze(-1) - anchors.tail)
        ks = [_retrieved(budget, last, anchors) for budget in budgets]
        values = trace.values[:, : keys.shape[1]]
        return objectives.residual_term(scores, student, values, visible, mid.expand(scores.shape), ks, spec.weight_z)
    return objectives.weighted_terms(scores, student, visible, objective_weights(spec))


def _retrieved(budget: float, last: Tensor, anchors: AnchorSpec) -> Tensor:
    """K of each row that sees the positions up to `last`."""
    counts = {p: retrieved_count(budget, p + 1, anchors.sink + anchors.tail) for p in last.unique().tolist()}
    return torch.tensor([counts[p] for p in last.tolist()], device=last.device)


def objective_weights(spec: ObjectiveSpec) -> objectives.Weights:
    """L_ours = lambda_KL L_KL + (1 - lambda_KL) L_aux, or one of the two alone."""
    kl = {"ours": spec.lambda_kl, "kl": 1.0, "aux": 0.0}[spec.name]
    top, fp, z = ((1 - kl) * x for x in (spec.lambda_top, spec.lambda_fp, spec.lambda_z))
    return objectives.Weights(kl, top, fp, z, spec.tau, spec.band, spec.huber_delta)


def learning_rate(spec: TrainSpec, step: int) -> float:
    """Linear warm-up, then constant or half a cosine down to zero at the last step."""
    warm = min(1.0, (step + 1) / spec.warmup_steps) if spec.warmup_steps else 1.0
    decay = 0.5 * (1 + math.cos(math.pi * step / spec.steps)) if spec.schedule == "cosine" else 1.0
    return spec.learning_rate * warm * decay


@torch.no_grad()
def held_out_errors(
    maps: PhiMaps, packs: Sequence[Sequence[LayerTrace]], k: int, anchors: AnchorSpec
) -> tuple[float, float, float, float]:
    """Mean over packs, heads and queries of e_topk, e_sub, e_nosub, and the mean residual log-Z error (where
    defined).
    """
    columns: dict[str, list[Tensor]] = {"e_topk": [], "e_sub": [], "e_nosub": [], "log_z": []}
    for pack in packs:
        for layer, trace in enumerate(pack):
            rows = layer_measures(maps, layer, trace.queries, trace.keys, trace.values, trace.scale, k, anchors)
            for name in ("e_topk", "e_sub", "e_nosub"):
                columns[name].append(rows[name].flatten())
            gap = (rows["log_z_hat"] - rows["log_z_true"]).flatten()
            columns["log_z"].append(gap[torch.isfinite(gap)])
    return tuple(torch.cat(column).mean().item() for column in columns.values())  # type: ignore[return-value]


def _held_out_packs(spec: TrainSpec, backbone: Backbone, assets: Path) -> list[Traces]:
    """Traces of held-out text: `length` keys, and the queries of the tokens right after them."""
    length = tokens_of(spec.length)
    corpus = held_out_corpus(HELD_OUT, backbone.tokenizer, length + HELD_OUT_QUERIES, spec.seed, assets)
    positions = torch.arange(length, length + HELD_OUT_QUERIES, device=backbone.device)
    packs = []
    for index in range(HELD_OUT_PACKS):
        traces = record_traces(backbone, corpus.sequence(index), positions, keep_values=True)
        packs.append(
            [LayerTrace(t.queries, t.keys[:, :length], t.values[:, :length], t.positions, t.scale) for t in traces]
        )
    return packs


def _seed(seed: int, what: str, index: int) -> int:
    """A 63-bit seed that is the same on every machine and Python process."""
    return int(sha256_text(f"{seed}/{what}/{index}")[:15], 16)
