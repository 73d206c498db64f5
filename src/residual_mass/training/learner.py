"""One variant in training: its maps, their optimiser, and checks for NaN and infinities."""

from __future__ import annotations

import dataclasses
import json
import math
import time

import torch
from torch import Tensor

from residual_mass.backbones.phi_maps import HeadShape, PhiMaps
from residual_mass.core.settings import to_json, tokens_of
from residual_mass.study.specs import TrainSpec, VariantSpec
from residual_mass.training.initialise import positive_random_features
from residual_mass.training.losses import row_losses
from residual_mass.training.passes import Traces, training_budgets
from residual_mass.training.teacher import LayerTrace

MOMENTS = ("exp_avg", "exp_avg_sq")


class Learner:
    """A variant's maps and optimiser.

    Attributes:
        seconds: time spent only on this variant; approximate on a GPU, which runs asynchronously.
        worked: seconds for losses and gradients of each layer in the current step.
    """

    def __init__(self, spec: TrainSpec, variant: VariantSpec, shape: HeadShape, device: torch.device):
        self.spec, self.label, self.objective = spec, variant.label, variant.objective
        torch.manual_seed(spec.seed)
        self.maps = PhiMaps(shape, variant.map, _facts(spec, variant)).to(device)
        self.optimiser = torch.optim.AdamW(
            self.maps.parameters(), lr=spec.learning_rate, weight_decay=spec.weight_decay, fused=True
        )
        self.calibrated = variant.map.init == "positive_random_features"
        self.seconds = 0.0
        self.worked: dict[int, float] = {}
        self.losses: dict[int, Tensor] = {}
        """By layer, the mean loss of every query head [Hq] over the sequences of the current step."""
        wanted = self.objective.budgets or spec.eval_budgets
        self.supports = [i for i, budget in enumerate(training_budgets(spec)) if budget in wanted]

    def initialise(self, first_pass: Traces) -> None:
        """Initialises the maps with positive random features if the variant asks for them."""
        if self.calibrated:
            spec = self.spec
            positive_random_features(self.maps, first_pass, spec.anchors, spec.eval_budgets, spec.seed)

    def backward(self, layer: int, trace: LayerTrace) -> None:
        """Adds one sequence's gradient of one layer, divided by the number of sequences of a step."""
        started = time.perf_counter()
        if self.objective.name == "residual" and trace.targets is not None:
            trace = dataclasses.replace(trace, targets=trace.targets.select_supports(self.supports))
        query_map, key_map = self.maps.query[layer], self.maps.key[layer]
        losses = row_losses(query_map, key_map, trace, self.objective, self.spec.anchors, self.spec.precision)
        losses = losses.mean(-1) / self.spec.sequences_per_step
        losses.mean().backward()
        self.losses[layer] = self.losses.get(layer, 0) + losses.detach()
        self.worked[layer] = self.worked.get(layer, 0.0) + time.perf_counter() - started

    def problem(self) -> str | None:
        """Says where a loss or gradient of this step is not finite; None if all are finite."""
        losses = self._by_layer()
        if not torch.isfinite(losses).all():
            layer, head = (~torch.isfinite(losses)).nonzero()[0].tolist()
            return f"the loss is {losses[layer, head].item()} in layer {layer}, head {head}"
        gradients = {name: p.grad for name, p in self.maps.named_parameters() if p.grad is not None}
        norms = torch.stack(torch._foreach_norm(list(gradients.values())))
        if torch.isfinite(norms).all():
            return None
        name = list(gradients)[int((~torch.isfinite(norms)).nonzero()[0])]
        finite_heads = gradients[name].isfinite().flatten(1).all(1)  # every parameter is stacked over heads
        side, layer, parameter = name.split(".")
        head = int((~finite_heads).nonzero()[0])
        return f"the gradient of {parameter} is not finite in layer {layer}, {side} head {head}"

    def loss(self) -> float:
        """Returns the current step's loss, averaged over layers and heads."""
        return self._by_layer().mean().item()

    def update(self, step: int) -> None:
        started = time.perf_counter()
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate(self.spec, step)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.losses.clear()
        self.worked.clear()
        self.seconds += time.perf_counter() - started

    def _by_layer(self) -> Tensor:
        """Stacks the losses: [layers, Hq]."""
        return torch.stack([self.losses[layer] for layer in range(self.maps.shape.layers)])

    def state(self) -> dict[str, Tensor]:
        """Returns parameters and moments for a checkpoint."""
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


def learning_rate(spec: TrainSpec, step: int) -> float:
    """Returns the learning rate: linear warm-up, then constant or half a cosine down to zero at the last step."""
    warm = min(1.0, (step + 1) / spec.warmup_steps) if spec.warmup_steps else 1.0
    decay = 0.5 * (1 + math.cos(math.pi * step / spec.steps)) if spec.schedule == "cosine" else 1.0
    return spec.learning_rate * warm * decay


def _facts(spec: TrainSpec, variant: VariantSpec) -> dict[str, object]:
    """Returns the training facts for the maps' file, without the other variants, which do not affect these maps."""
    recipe = json.loads(to_json(dataclasses.replace(spec, variants=(variant,))))
    backbone = spec.backbone
    return {
        "model_id": backbone.model_id,
        "revision": backbone.revision,
        "length": tokens_of(spec.length),
        "recipe": recipe,
    }
