"""One layer's training loss as a reader of the paper would write it: what `training_pass.py` compares the trainer with.

One module of `nn.Linear` layers per head, maps as the paper writes them, and autograd through the whole [query, key]
score matrix of every head. Within that style it wastes nothing: phi_k is computed once per KV head, teacher quantities
carry no graph, keys that no query sees are left out, and torch's own fused losses are used.

Shape letters: Hq / Hkv = query / KV heads, Q = query positions, L = keys, D = head dimension, M = features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from residual_mass.core.feature_maps import ReZeroMap
from residual_mass.core.settings import AnchorSpec
from residual_mass.model.phi_maps import PhiMaps
from residual_mass.study.sections import ObjectiveSpec
from residual_mass.training.learner import row_losses
from residual_mass.training.teacher import LayerTrace

MASKED = -1e9
"""Score of a key that a query may not see; finite, so that 0 * (log p - log p_hat) is 0 and not NaN."""


class HeadMap(nn.Module):
    """phi of one head: stem, one ReZero block, output; everything before the exponential."""

    def __init__(self, d_in: int, d_emb: int, d_phi: int) -> None:
        super().__init__()
        self.stem = nn.Linear(d_in, d_emb)
        self.up = nn.Linear(d_emb, d_emb)
        self.down = nn.Linear(d_emb, d_emb)
        self.out = nn.Linear(d_emb, d_phi)
        self.alpha = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """[N, D] -> log phi [N, M]."""
        stem = self.stem(x)
        return self.out(stem + self.alpha * self.down(F.gelu(self.up(stem))))


class LayerMaps(nn.Module):
    """phi_q of every query head and phi_k of every KV head of one layer."""

    def __init__(self, query: list[HeadMap], key: list[HeadMap]) -> None:
        super().__init__()
        self.query, self.key = nn.ModuleList(query), nn.ModuleList(key)


def copy_layer(maps: PhiMaps, layer: int) -> LayerMaps:
    """One layer of `maps` (which must be ReZero maps), head by head, with its own copy of the parameters."""
    return LayerMaps(_copies(maps.query[layer]), _copies(maps.key[layer]))


def trainers_loss(
    maps: PhiMaps, layer: int, trace: LayerTrace, spec: ObjectiveSpec, precision: str = "float32"
) -> Tensor:
    """The other side of the comparison: the same mean loss as the trainer computes it."""
    return row_losses(maps.query[layer], maps.key[layer], trace, spec, AnchorSpec(), precision).mean()


def layer_loss(maps: LayerMaps, trace: LayerTrace, spec: ObjectiveSpec) -> Tensor:
    """The objective `ours` (the paper's) on one layer's trace: mean over its query heads and positions."""
    trace = trace.widened()
    keys = trace.keys[:, : int(trace.positions.max()) + 1]
    group = len(maps.query) // len(maps.key)
    visible = torch.arange(keys.shape[1], device=keys.device) <= trace.positions.unsqueeze(-1)  # [Q, L]
    losses = []
    for kv_head, key_map in enumerate(maps.key):
        log_key = key_map(keys[kv_head])
        for head in range(kv_head * group, (kv_head + 1) * group):
            scores = trace.queries[head] @ keys[kv_head].T * trace.scale
            student = log_kernel(maps.query[head](trace.queries[head]), log_key)
            losses.append(head_loss(scores, student, visible, spec))
    return torch.stack(losses).mean()


def log_kernel(log_query: Tensor, log_key: Tensor) -> Tensor:
    """log <phi_q, phi_k>: [Q, M] and [L, M] -> [Q, L], each vector in units of its largest feature."""
    query_shift = log_query.detach().amax(-1, keepdim=True)
    key_shift = log_key.detach().amax(-1, keepdim=True)
    z = (log_query - query_shift).exp() @ (log_key - key_shift).exp().T
    return z.clamp_min(1e-30).log() + query_shift + key_shift.T


def head_loss(scores: Tensor, student: Tensor, visible: Tensor, spec: ObjectiveSpec) -> Tensor:
    """lambda_KL L_KL + (1 - lambda_KL) (lambda_top L_top + lambda_fp L_fp + lambda_Z L_Z) of one query head.

    Args:
        scores, student: [Q, L], of the teacher and of the maps; visible: [Q, L] bool.
    """
    scores = scores.masked_fill(~visible, MASKED)
    most = scores.amax(-1, keepdim=True)
    r, r_hat = scores - most, (student - most).masked_fill(~visible, MASKED)

    p, log_p = (r / spec.tau).softmax(-1), (r / spec.tau).log_softmax(-1)
    kl = spec.tau**2 * (p * (log_p - (r_hat / spec.tau).log_softmax(-1))).sum(-1)

    near = r >= -spec.band
    far = visible & ~near
    above = (r_hat + spec.band).clamp_min(0)
    top = _mean_over(F.huber_loss(r_hat, r, reduction="none", delta=spec.huber_delta), near)
    false_positive = _mean_over(_huber(above, spec.huber_delta), far)
    excess = (_log_sum_exp(r_hat) - _log_sum_exp(r)).clamp_min(0)
    partition = _huber(excess, spec.huber_delta)

    auxiliary = spec.lambda_top * top + spec.lambda_fp * false_positive + spec.lambda_z * partition
    return (spec.lambda_kl * kl + (1 - spec.lambda_kl) * auxiliary).mean()


def gradient_deviation(maps: PhiMaps, layer: int, copied: LayerMaps) -> float:
    """Largest |g - g'| / |g'| over one layer's heads and parameters, g and g' being the gradients of both sides.

    The ReZero gates of a layer's query or key maps are compared as one vector: a gate's gradient is a single sum of
    many terms of both signs, which in some heads comes out so near 0 that nothing but rounding is left of it.
    """
    deviations = [
        (ours - theirs).norm() / theirs.norm()
        for stacked, heads in ((maps.query[layer], copied.query), (maps.key[layer], copied.key))
        for ours, theirs in _gradients(stacked, list(heads))
    ]
    return torch.stack(deviations).max().item()  # unlike Python's max never loses a NaN


def _gradients(stacked: nn.Module, heads: Sequence[nn.Module]) -> Iterator[tuple[Tensor, Tensor]]:
    """Gradients of both sides: of every weight and bias by head, of all gates together."""
    gates: list[tuple[Tensor, Tensor]] = []
    for head, module in enumerate(heads):
        for theirs, ours in _counterparts(stacked, module):
            assert ours.grad is not None and theirs.grad is not None
            pair = _of_head(ours.grad, head, theirs), theirs.grad
            if theirs.ndim == 0:
                gates.append(pair)
            else:
                yield pair
    ours_gates, their_gates = zip(*gates, strict=True)
    yield torch.stack(ours_gates), torch.stack(their_gates)


def _copies(stacked: nn.Module) -> list[HeadMap]:
    assert isinstance(stacked, ReZeroMap)
    heads, d_in, d_emb = stacked.stem.shape
    copies = []
    for head in range(heads):
        module = HeadMap(d_in, d_emb, stacked.out.shape[-1]).to(stacked.stem)
        with torch.no_grad():
            for theirs, ours in _counterparts(stacked, module):
                theirs.copy_(_of_head(ours, head, theirs))
        copies.append(module)
    return copies


def _counterparts(stacked: nn.Module, module: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """One head's parameters, each with the stacked parameter that holds the same numbers."""
    by_name = dict(stacked.named_parameters())
    for name, parameter in module.named_parameters():
        yield parameter, by_name[name.replace(".weight", "").replace(".bias", "_bias")]


def _of_head(stacked: Tensor, head: int, like: Tensor) -> Tensor:
    """One head's part of a stacked tensor, in the layout of nn.Linear (weights are applied from the left there)."""
    return stacked[head].T.reshape(like.shape)


def _log_sum_exp(x: Tensor) -> Tensor:
    """[Q, L] -> [Q], by way of the first key, which every query sees: torch's logsumexp is five times as slow on CPUs,
    where exp of what underflows is slow.
    """
    return x[:, 0] - x.log_softmax(-1)[:, 0]


def _huber(x: Tensor, delta: float) -> Tensor:
    return F.huber_loss(x, torch.zeros_like(x), reduction="none", delta=delta)


def _mean_over(values: Tensor, where: Tensor) -> Tensor:
    """Mean of each row over `where`; 0 for a row with nothing in it."""
    return torch.where(where, values, 0).sum(-1) / where.sum(-1).clamp_min(1)
