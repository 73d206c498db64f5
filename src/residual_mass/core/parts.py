"""Parts of a mid-region: blocks of neighbours, or clusters of keys.

The part of a token is its number, -1 outside the mid-region: memory grows with L, not with L x P.

Shape letters: L = keys, P = parts, C = columns, D = head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

ROUNDS = 8
"""Of Lloyd's algorithm; more change attention errors in the third digit."""
AT_ONCE = 2**22
"""Numbers of an [L, P] matrix held at once, 16 MiB per KV head in float32: all of 64 parts of 64k tokens, or of one
part per 16 of 8k tokens.
"""


def blocks(mid: Tensor, parts: int) -> Tensor:
    """Cuts the mid-region into runs of equally many neighbours, give or take one: [..., L] int64.

    Args:
        mid: [..., L] bool.
    """
    place = mid.cumsum(-1) - 1
    count = mid.sum(-1, keepdim=True).clamp_min(1)
    return torch.where(mid, place * parts // count, -1)


def clusters(keys: Tensor, mid: Tensor, parts: int) -> Tensor:
    """Clusters the mid-region's keys by k-means, from keys at equal distances in the text: [..., L] int64.

    A cluster may end up without tokens; the same keys give the same clusters.

    Args:
        keys: [..., L, D].
        mid: [..., L] bool.
    """
    return _moved(keys, mid, blocks(mid, parts), parts, None)


def clusters_of(keys: Tensor, mid: Tensor, size: int) -> Tensor:
    """The same with one cluster for `size` tokens of the mid-region, at most P = ceil(L / size)."""
    parts = -(-mid.shape[-1] // size)
    starts = torch.where(mid, (mid.cumsum(-1) - 1) // size, -1)
    return _moved(keys, mid, starts, parts, counts(starts, parts) > 0)


def _moved(keys: Tensor, mid: Tensor, starts: Tensor, parts: int, present: Tensor | None) -> Tensor:
    """Lloyd's algorithm from the first tokens of the parts `starts`, with the clusters `present` as in `nearest`."""
    columns = torch.arange(starts.shape[-1], device=starts.device).expand_as(starts)
    none = torch.full((*starts.shape[:-1], parts + 1), starts.shape[-1], device=starts.device)
    first = none.scatter_reduce(-1, starts % (parts + 1), columns, "amin")[..., :parts]  # -1 goes to the last slot
    first = torch.where(first < starts.shape[-1], first, 0)
    centres = keys.gather(-2, first.unsqueeze(-1).expand(*first.shape, keys.shape[-1]))
    for _ in range(ROUNDS):
        part = nearest(keys, mid, centres, present)
        count = counts(part, parts).to(keys.dtype).unsqueeze(-1)
        centres = torch.where(count > 0, totals(keys, part, parts) / count.clamp_min(1), centres)
    return nearest(keys, mid, centres, present)


def nearest(keys: Tensor, mid: Tensor, centres: Tensor, present: Tensor | None) -> Tensor:
    """Assigns each key to the nearest of some centres: [..., L] int64.

    Args:
        keys: [..., L, D].
        mid: [..., L] bool, keys that belong to any; the others belong to none.
        centres: [..., P, D].
        present: [..., P] bool, centres to choose from; the first where there are none. None for all.
    """
    found = []
    for rows in _chunks(keys.shape[-2], centres.shape[-2]):
        distances = torch.cdist(keys[..., rows, :], centres)
        if present is not None:
            distances = distances.masked_fill(~present.unsqueeze(-2), torch.inf)
        found.append(distances.argmin(-1))
    return torch.where(mid, torch.cat(found, -1) if found else mid.long(), -1)


def counts(part: Tensor, parts: int) -> Tensor:
    """Counts the tokens of every part: [..., P] int64."""
    slots = part.new_zeros(*part.shape[:-1], parts + 1)
    return slots.scatter_add_(-1, part % (parts + 1), torch.ones_like(part))[..., :parts]


def totals(x: Tensor, part: Tensor, parts: int, share: Tensor | None = None) -> Tensor:
    """Sums x [..., L, C] over the tokens of every part, in the same order on every run: [..., P, C].

    Args:
        part: [..., L] int64, -1 for none.
        share: [..., P], multiplies a part's summands before they are added.
    """
    numbers, total = torch.arange(parts, device=part.device), x.new_zeros(*x.shape[:-2], parts, x.shape[-1])
    for rows in _chunks(part.shape[-1], parts):
        members = (part[..., rows].unsqueeze(-1) == numbers).to(x.dtype)
        if share is not None:
            members = members * share.unsqueeze(-2)
        total = total + members.transpose(-1, -2) @ x[..., rows, :]
    return total


def _chunks(tokens: int, parts: int) -> Iterator[slice]:
    size = max(1, AT_ONCE // max(parts, 1))
    return (slice(start, start + size) for start in range(0, tokens, size))
