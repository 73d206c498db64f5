"""A plain float64 version of a step of `LayerCache`, from the contents of the cache."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from residual_mass.kernels import LayerCache

BLOCK = 64
COARSE = 1 / 2048
"""Units of rounded queries, in units of log 2, above which there are finer codes."""
ROUNDINGS = 64 * torch.finfo(torch.float32).eps
"""Deviations of scores below this share of a cluster's largest mean score count as this, a floor of the method."""


def attended(cache: LayerCache, query: Tensor, scale: float) -> tuple[Tensor, Tensor, float]:
    """Outputs [B, H G, D] and log masses [B, H G] of one step, and the least distance in nats of a chosen token's score
    from that of one not chosen, where they are not equal.
    """
    group = query.shape[1] // cache.heads
    outputs, masses, gaps = [], [], []
    for row in range(cache.batch):
        for index in range(query.shape[1]):
            q = (query[row, index].float() * (scale / math.log(2))).double() * math.log(2)
            scores, values, gap = terms_of_head(cache, row, index // group, q)
            masses.append(scores.logsumexp(0))
            outputs.append(scores.softmax(0) @ values)
            gaps.append(gap)
    shape = query.shape[:2]
    return torch.stack(outputs).view(*shape, -1), torch.stack(masses).view(shape), min(gaps)


def terms_of_head(cache: LayerCache, row: int, head: int, q: Tensor) -> tuple[Tensor, Tensor, float]:
    """Scores and values of every token, the unread ones of a planes cache as one of score log Z and value nu / Z."""
    recent = cache.recent[row, head, : int(cache.recents[row])].double()
    scores, values, gap = [recent[:, 0] @ q], [recent[:, 1]], math.inf
    places = real_places(cache, row)
    if cache.bits == 16:
        keys, rows = paired(cache, row, head)
        scores.append(keys[places] @ q), values.append(rows[places])
    elif cache.bits == 8:
        codes, rows = eight(cache, row, head)
        scores.append(scores_of_codes(cache, row, head, q, codes)[places]), values.append(rows[places])
    elif len(places):
        high, low, rows = planes(cache, row, head)
        scanned = scores_of_codes(cache, row, head, q, 16 * high + 7.5)
        exact = scores_of_codes(cache, row, head, q, 16 * high + low)
        k = min(int(cache.k[row]), len(places))
        order = places[scanned[places].sort(descending=True, stable=True).indices]
        read, unread = order[:k], order[k:]
        scores.append(exact[read]), values.append(rows[read])
        if k and len(unread):
            edge = float(scanned[read[-1]] - scanned[unread[0]])
            gap = edge if edge else math.inf
        if cache.residual and len(unread):
            log_mass, value = regression(cache, row, head, q, scanned, unread)
            scores.append(log_mass[None]), values.append(value[None])
    return torch.cat(scores), torch.cat(values), gap


def real_places(cache: LayerCache, row: int) -> Tensor:
    places = torch.arange(int(cache.slots[row]))
    start, end = cache.gap[row].tolist()
    return places[(places < start) | (places >= end)]


def scores_of_codes(cache: LayerCache, row: int, head: int, q: Tensor, codes: Tensor) -> Tensor:
    """Scores in nats of keys middle + step * (codes - 127.5), codes [P, D], with the query times step in 8 bits, and
    for the high halves of the codes in 15 bits if a unit of 8 bits is coarse.
    """
    scores = []
    for block, own in enumerate(codes.split(BLOCK)):
        middle, step = cache.scales[row, head, block].double()
        scaled = (q / math.log(2)).float() * step.float()
        top = scaled.abs().max().clamp_min(1e-30)
        unit = top / 127
        whole = (scaled * torch.full_like(top, 127).div(top)).round()
        product = (own - 127.5) @ whole.double()
        if unit > COARSE:
            fine = ((scaled * torch.full_like(unit, 256).div(unit)).round() - 256 * whole).clamp(-127, 127)
            product += (own // 16 * 16 + 7.5 - 127.5) @ fine.double() / 256
        scores.append(q @ middle + unit.double() * math.log(2) * product)
    return torch.cat(scores) if scores else q.new_zeros(0)


def regression(cache: LayerCache, row: int, head: int, q: Tensor, s: Tensor, unread: Tensor) -> tuple[Tensor, Tensor]:
    """log Z and nu / Z of the unread tokens as `ScanRegression` defines them."""
    left = torch.zeros(len(s), dtype=torch.bool)
    left[unread] = True
    shift = s[unread].max()
    mass, along, squares, count, largest = 0.0, 0.0, 0.0, 0, 0.0
    nu = torch.zeros_like(q)
    for (start, end), value in zip(
        cache.bounds[row, head].tolist(), cache.mean_values[row, head].double(), strict=True
    ):
        if start == end:
            continue
        own = s[start:end]
        weights = torch.where(left[start:end], own - shift, -math.inf).exp()
        offset = own - own.mean()
        nu += weights.sum() * value
        mass, along = mass + weights.sum(), along + weights @ offset
        squares, count, largest = squares + offset.square().sum(), count + end - start, max(largest, own.mean().abs())
    deviation = max(math.sqrt(max(squares / count, 1e-8)), ROUNDINGS * largest)
    limit = cache.deviations[row, head].double()
    slope = (q @ cache.slope[row, head].double() / deviation).clamp(-limit, limit)
    return mass.log() + shift, (nu + along / deviation * slope) / mass


def planes(cache: LayerCache, row: int, head: int) -> tuple[Tensor, Tensor, Tensor]:
    """High codes, low codes and values of all places, [64 N, D]."""
    width, blocks = cache.width, cache.blocks
    high = torch.zeros(blocks * BLOCK, width, dtype=torch.float64)
    packed = cache.keys[row, head].view(blocks, width // 8, BLOCK, 4)
    for j in range(width // 8):
        for i in range(4):
            high[:, 8 * j + i] = (packed[:, j, :, i] % 16).flatten().double()
            high[:, 8 * j + 4 + i] = (packed[:, j, :, i] // 16).flatten().double()
    rows = cache.rows[row, head].view(blocks * BLOCK, -1)
    low = torch.cat((rows[:, : width // 2] % 16, rows[:, : width // 2] // 16), -1).double()
    codes = rows[:, width // 2 : width // 2 + width].contiguous().view(torch.int8).double()
    return high, low, codes * rows[:, -2:].contiguous().view(torch.bfloat16).double()


def eight(cache: LayerCache, row: int, head: int) -> tuple[Tensor, Tensor]:
    """Codes of keys, and values, [64 N, D]."""
    width, blocks = cache.width, cache.blocks
    codes = cache.keys[row, head].view(blocks, width // 4, BLOCK, 4).transpose(1, 2).reshape(-1, width).double()
    values = cache.values[row, head].view(blocks, BLOCK // 2, width, 2).transpose(2, 3).reshape(-1, width)
    return codes, values.view(torch.int8).double() * cache.value_scales[row, head, :, None].double()


def paired(cache: LayerCache, row: int, head: int) -> tuple[Tensor, Tensor]:
    """Keys and values in bfloat16, [64 N, D]."""
    width, blocks = cache.width, cache.blocks
    keys, values = (x[row, head].view(torch.bfloat16) for x in (cache.keys, cache.values))
    keys = keys.view(blocks, width // 2, BLOCK, 2).transpose(1, 2).reshape(-1, width)
    return keys.double(), values.view(blocks, BLOCK // 2, width, 2).transpose(2, 3).reshape(-1, width).double()
