"""Blocks of neighbouring tokens, which selectors summarise one by one.

Shape letters: L = keys, N = blocks, S = tokens of a block, D = head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def check_size(size: int) -> None:
    """Raises ValueError for groups of less than a token."""
    if size < 1:
        raise ValueError(f"size is {size}, not 1 or more tokens")


def with_groups_of(residual: Any, selector: Any) -> Any:
    """Gives a residual of groups the `size` (and `split`) of its selector's, where it has none of its own.

    Raises:
        ValueError: the selector scores no groups by their mean keys, or other ones than the residual names.
    """
    inner = getattr(selector, "scan", selector)
    needs, has = type(residual).__name__, type(inner).__name__
    if not hasattr(inner, "groups"):
        raise ValueError(f"{needs} needs a selector of groups by mean keys (PagesByMean, WholeClusters), not {has}")
    own = {"size": inner.size, "split": inner.groups}
    for name in own.keys() & vars(residual).keys():
        given = getattr(residual, name)
        if given not in (None, own[name]):
            raise ValueError(f"{needs} has {name}={given!r} and {has} {own[name]!r}: leave it out of {needs}")
    return replace(residual, **{name: value for name, value in own.items() if hasattr(residual, name)})


def blocks_of(x: Tensor, size: int) -> Tensor:
    """[..., L, C] -> [..., N, S, C], the last block filled up with zeros."""
    from torch.nn.functional import pad

    return pad(x, (0, 0, 0, -x.shape[-2] % size)).unflatten(-2, (-1, size))


def inside(keys: Tensor, mid: Tensor, size: int) -> Tensor:
    """Which tokens of each block are in the mid-region [..., L], for keys [..., L, D]: [..., N, S, 1] bool."""
    return blocks_of(mid.expand(keys.shape[:-1]).unsqueeze(-1), size)


def bounds_of(keys: Tensor, mid: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Least and largest key of each block's mid-region, channel by channel: [..., N, D] each; zeros of an empty one."""
    import torch

    blocks, members = blocks_of(keys, size), inside(keys, mid, size)
    low = torch.where(members, blocks, torch.inf).amin(-2).nan_to_num(posinf=0)
    return low, torch.where(members, blocks, -torch.inf).amax(-2).nan_to_num(neginf=0)


def scores_of_tokens(scores: Tensor, size: int, tokens: int) -> Tensor:
    """Gives every token the score of its block: [..., R, N] -> [..., R, L]."""
    return scores.repeat_interleave(size, dim=-1)[..., :tokens]


def in_order(scores: Tensor, group: Tensor) -> Tensor:
    """Ranks tokens by the scores of their groups, and within a group as they come: [..., R, L], the highest first.

    Args:
        scores: [..., R, N], of the groups; of equal ones the first comes first.
        group: [..., 1 or R, L] int64, of every token.
    """
    import torch

    tokens, groups = group.shape[-1], scores.shape[-1]
    exact = torch.float32 if groups * tokens <= 2**24 else torch.float64  # holds the ranks as whole numbers
    rank = scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1).to(exact)
    first = (-tokens * rank).gather(-1, group.expand(*scores.shape[:-1], tokens))
    return first - torch.arange(tokens, device=scores.device, dtype=exact)


def joined(state: Sequence[Tensor], new: Sequence[Tensor], kept: Sequence[int]) -> list[Tensor]:
    """Puts a summary of later blocks behind the first `kept` rows of each part of an earlier one."""
    import torch

    return [torch.cat((old[..., :n, :], part), -2) for old, part, n in zip(state, new, kept, strict=True)]
