"""Parts of a mid-region: blocks of neighbours, or clusters of keys.

Shape letters: L = keys, P = parts, D = head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 8
"""Of Lloyd's algorithm; more change attention errors in the third digit."""


def blocks(mid: Tensor, parts: int) -> Tensor:
    """Cuts the mid-region into runs of equally many neighbours, give or take one: [..., L, P] bool.

    Args:
        mid: [..., L] bool.
    """
    place = mid.cumsum(-1) - 1
    count = mid.sum(-1, keepdim=True).clamp_min(1)
    return _members(place * parts // count, mid, parts)


def clusters(keys: Tensor, mid: Tensor, parts: int) -> Tensor:
    """Clusters the mid-region's keys by k-means, from keys at equal distances in the text: [..., L, P] bool.

    A cluster may end up without tokens; the same keys give the same clusters.

    Args:
        keys: [..., L, D].
        mid: [..., L] bool.
    """
    starts = blocks(mid, parts)
    return _moved(keys, mid, starts, None)


def clusters_of(keys: Tensor, mid: Tensor, size: int) -> Tensor:
    """The same with one cluster for `size` tokens of the mid-region, at most P = ceil(L / size)."""
    parts = -(-mid.shape[-1] // size)
    place = mid.cumsum(-1) - 1
    starts = _members(place // size, mid, parts)
    return _moved(keys, mid, starts, starts.any(-2))


def _moved(keys: Tensor, mid: Tensor, starts: Tensor, present: Tensor | None) -> Tensor:
    """Lloyd's algorithm from the first tokens of `starts` [..., L, P], with the clusters `present` as in `nearest`."""
    first = starts.to(torch.int8).argmax(-2)
    centres = keys.gather(-2, first.unsqueeze(-1).expand(*first.shape, keys.shape[-1]))
    for _ in range(ROUNDS):
        members = nearest(keys, mid, centres, present).to(keys.dtype)
        count = members.sum(-2).unsqueeze(-1)
        centres = torch.where(count > 0, members.transpose(-1, -2) @ keys / count.clamp_min(1), centres)
    return nearest(keys, mid, centres, present)


def nearest(keys: Tensor, mid: Tensor, centres: Tensor, present: Tensor | None) -> Tensor:
    """Assigns each key to the nearest of some centres: [..., L, P] bool.

    Args:
        keys: [..., L, D].
        mid: [..., L] bool, keys that belong to any; the others belong to none.
        centres: [..., P, D].
        present: [..., P] bool, centres to choose from; the first where there are none. None for all.
    """
    distances = torch.cdist(keys, centres)
    if present is not None:
        distances = distances.masked_fill(~present.unsqueeze(-2), torch.inf)
    return _members(distances.argmin(-1), mid, centres.shape[-2])


def _members(part: Tensor, mid: Tensor, parts: int) -> Tensor:
    return (part.unsqueeze(-1) == torch.arange(parts, device=part.device)) & mid.unsqueeze(-1)
