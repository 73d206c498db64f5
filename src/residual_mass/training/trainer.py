"""Trains the feature maps of one backbone at one length.

A step takes one teacher pass (new, or replayed from a pool), samples query positions, and runs every layer's maps
forward and backward on their own; then one AdamW update. All randomness is a function of (seed, step), so a resumed run
is the undisturbed run.

Shape letters: Hkv = KV heads, G = query heads of a KV head, Q = query positions of the step, L = visible keys.
"""

from __future__ import annotations

import json
import logging
import math
import random
import time
from collections.abc import Sequence
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
from residual_mass.specs import AnchorSpec, ObjectiveSpec, TrainSpec, to_json, tokens_of
from residual_mass.training.initialise import positive_random_features
from residual_mass.training.teacher import LayerTrace, record_traces, stream_traces

log = logging.getLogger(__name__)

HELD_OUT = "wiki"
"""Text that progress is measured on; needs the assets."""
HELD_OUT_PACKS, HELD_OUT_QUERIES = 2, 4
LOG_COLUMNS = "step,k,e_topk,e_sub,e_nosub,log_z_error,train_loss"


def run(spec: TrainSpec, assets: Path, checkpoint: Path, out: Path, log_csv: Path) -> None:
    """The `train` stage: writes the maps, the held-out log and the provenance sidecar."""
    length = tokens_of(spec.length)
    if length > spec.backbone.context:
        raise ValueError(
            f"length {spec.length}: longer than the context of {spec.backbone.name} ({spec.backbone.context})"
        )
    backbone = load_backbone(spec.backbone, assets)
    corpus = training_corpus(spec.corpora, backbone.tokenizer, length, spec.seed, assets)
    trainer = Trainer(spec, backbone, corpus, _held_out_packs(spec, backbone, assets))
    log.info("training phi of %s at %d tokens on %s", spec.backbone.model_id, length, backbone.device)
    trainer.resume(checkpoint)
    trainer.train(checkpoint)
    trainer.maps.save(out)
    write_text(log_csv, "\n".join([LOG_COLUMNS, *trainer.log_rows]) + "\n")
    write_meta(out, spec=asdict(spec), device=str(backbone.device), identity=backbone.identity)
    checkpoint.unlink(missing_ok=True)


class Trainer:
    """Maps, optimiser and the pool of teacher passes by index."""

    def __init__(self, spec: TrainSpec, backbone: Backbone, corpus: Corpus, held_out: list[list[LayerTrace]]):
        self.spec, self.backbone, self.corpus, self.held_out = spec, backbone, corpus, held_out
        self.length = tokens_of(spec.length)
        self.step, self.log_rows = 0, []
        self.pool: dict[int, list[LayerTrace]] = {}
        torch.manual_seed(spec.seed)
        self.maps = PhiMaps(backbone.shape, spec.map, self._facts()).to(backbone.device)
        if spec.map.init == "positive_random_features":
            positive_random_features(self.maps, self._pass(0), spec.seed)
        self.optimiser = torch.optim.AdamW(
            self.maps.parameters(), lr=spec.learning_rate, weight_decay=spec.weight_decay, fused=True
        )

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
                self._log_held_out(loss)
            if checkpoint is not None and self.step % self.spec.checkpoint_every == 0:
                self.save_checkpoint(checkpoint)
        bar.close()

    def _update(self) -> float:
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate(self.spec, self.step)
        replay = self.spec.replay
        losses: list[float] = []
        if replay.pool == 1 and replay.reuse == 1:
            # Nothing is kept: every layer trains the moment the teacher reaches it, and its keys are gone after that.
            positions = self._positions(self.step, self.spec.queries_per_step)
            stream_traces(self.backbone, self.corpus.sequence(self.step), positions,
                          lambda layer, trace: losses.append(self._backward(layer, trace)))  # fmt: skip
        else:
            trace = self._replayed()
            rng = torch.Generator().manual_seed(_seed(self.spec.seed, "queries", self.step))
            chosen = torch.randperm(len(trace[0].positions), generator=rng)[: self.spec.queries_per_step]
            losses = [self._backward(layer, t.at(chosen)) for layer, t in enumerate(trace)]
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return sum(losses) / len(losses)

    def _backward(self, layer: int, trace: LayerTrace) -> float:
        loss = layer_loss(self.maps, layer, trace, self.spec.objective)
        if not torch.isfinite(loss):
            raise ValueError(f"loss is {loss.item()} in layer {layer} at step {self.step}; the last checkpoint is kept")
        loss.backward()
        return loss.item()

    def _replayed(self) -> list[LayerTrace]:
        """A random pass of the pool, which holds the newest passes; after a resume the missing ones are made again."""
        newest = self.step // self.spec.replay.reuse
        wanted = range(max(0, newest - self.spec.replay.pool + 1), newest + 1)
        self.pool = {index: self.pool.get(index) or self._pass(index) for index in wanted}
        return self.pool[random.Random(_seed(self.spec.seed, "pass", self.step)).choice(wanted)]

    def _pass(self, index: int) -> list[LayerTrace]:
        count = self.spec.queries_per_step * self.spec.replay.reuse
        keep_values = self.spec.objective.name == "lolcats"
        positions = self._positions(index, count)
        return record_traces(self.backbone, self.corpus.sequence(index), positions, keep_values)

    def _positions(self, index: int, count: int) -> Tensor:
        """Distinct query positions of a pass, uniform over the final share of the sequence."""
        window = min(self.length, round(self.length * self.spec.query_window))
        rng = torch.Generator().manual_seed(_seed(self.spec.seed, "positions", index))
        return (torch.randperm(window, generator=rng)[:count] + self.length - window).to(self.backbone.device)

    def _log_held_out(self, loss: float) -> None:
        for budget in self.spec.eval_budgets:
            anchors = self.spec.anchors
            k = retrieved_count(budget, self.length, anchors.sink + anchors.tail)
            errors = held_out_errors(self.maps, self.held_out, k, anchors)
            numbers = ",".join(f"{value:.6f}" for value in (*errors, loss))
            self.log_rows.append(f"{self.step},{k},{numbers}")
            log.info("step %d, K = %d: e_topk %.4f e_sub %.4f e_nosub %.4f log-Z %+.3f", self.step, k, *errors)

    def _facts(self) -> dict[str, object]:
        backbone = self.spec.backbone
        recipe = json.loads(to_json(self.spec))
        return {"model_id": backbone.model_id, "revision": backbone.revision, "length": self.length, "recipe": recipe}

    def save_checkpoint(self, path: Path) -> None:
        tensors = {}
        for name, parameter in self.maps.named_parameters():
            tensors[f"parameter.{name}"] = parameter.detach()
            for key in ("exp_avg", "exp_avg_sq"):
                tensors[f"{key}.{name}"] = self.optimiser.state[parameter][key]
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
        for name, parameter in self.maps.named_parameters():
            parameter.data.copy_(tensors[f"parameter.{name}"])
            moments = {key: tensors[f"{key}.{name}"].to(parameter.device) for key in ("exp_avg", "exp_avg_sq")}
            self.optimiser.state[parameter] = {
                "step": torch.tensor(float(self.step), device=parameter.device),
                **moments,
            }
        log.info("resumed from %s at step %d", path, self.step)

    def _spec_hash(self) -> str:
        return sha256_text(to_json(self.spec) + self.backbone.identity)


def layer_loss(maps: PhiMaps, layer: int, trace: LayerTrace, spec: ObjectiveSpec) -> Tensor:
    """Objective of one layer's maps on one trace, averaged over its query heads and positions."""
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
    return objectives.weighted_terms(scores, student, visible, objective_weights(spec))


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


def _held_out_packs(spec: TrainSpec, backbone: Backbone, assets: Path) -> list[list[LayerTrace]]:
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
