"""Causal attention of prompts by the compiled kernels, and the one place that says where they serve.

Shape letters: B = batch rows, H = KV heads, G = query heads of a KV head, T = new tokens, C = keys, D = head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from residual_mass.kernels.cpu import has_amx, multiplies_pairs
from residual_mass.kernels.library import WIDTHS, Buffers, Library, load, views

LOG2_E = 1.4426950408889634
KERNEL_DTYPES = (torch.float32, torch.bfloat16)
"""Of keys, values and queries that the kernels read."""
LEAST_TOKENS = 64
"""Of a prompt, or a further turn, that is read by tiles of queries; fewer do not fill them."""
NO_WINDOW = 2**30


def prompt_library(query: Tensor, key: Tensor, value: Tensor) -> Library | None:
    """Returns the kernels that read a prompt [B, H G, T, D] over keys and values [B, H, C, D]; None where torch's
    attention is as fast or the kernels cannot: on other devices, with gradients, by the portable kernels, in bfloat16
    on CPUs whose torch multiplies matrices by AMX, and of few tokens.
    """
    tensors = (query, key, value)
    if any(x.device.type != "cpu" or x.dtype != query.dtype for x in tensors) or query.dtype not in KERNEL_DTYPES:
        return None
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return None
    width = query.shape[3]
    if query.shape[2] < LEAST_TOKENS or width not in WIDTHS or value.shape[3] != width:
        return None
    if query.dtype == torch.bfloat16 and has_amx():
        return None
    library = load()
    return None if library is None or library.target == "portable" else library


def reads_at_once(library: Library, bits: int, query: Tensor) -> bool:
    """Returns whether the tokens of a further turn over a packed cache read it as a prompt is read, in floats; else
    they do in pieces, by products of codes: where the CPU multiplies bytes these are faster, but for caches in bfloat16
    where it multiplies pairs of such numbers.
    """
    if query.shape[2] < LEAST_TOKENS:
        return False
    if library.target != "avx512":
        return True
    return bits == 16 and query.dtype == torch.bfloat16 and multiplies_pairs()


def in_one_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns them as the kernels read them: in float32 unless all are in one of `KERNEL_DTYPES`."""
    dtype = query.dtype
    if dtype in KERNEL_DTYPES and key.dtype == value.dtype == dtype:
        return query, key, value
    return query.float(), key.float(), value.float()


def tensors_of(query: Tensor, key: Tensor, value: Tensor, log_mass: Tensor | None) -> list[Tensor]:
    """Returns the tensors of a call in the order of `Views` of kernels.cpp; the fourth is for its outputs."""
    batch, heads, count, width = query.shape
    output = torch.empty((batch, count, heads, width), dtype=query.dtype, device="cpu")
    tensors = [query, key, value, output]
    if log_mass is not None:
        tensors.append(log_mass.unsqueeze(-1))
    return tensors


def prompt_attention(
    library: Library,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    window: int | None = None,
    held: Buffers | None = None,
    threads: int | None = None,
    log_mass: Tensor | None = None,
) -> Tensor:
    """Computes the attention of the last T of C tokens, each to the tokens up to itself, in float32.

    In bfloat16 the weights of values are rounded to it as well where the CPU multiplies pairs of such numbers.

    Args:
        query: [B, H G, T, D] float32 or bfloat16; key, value: [B, H, C, D] of the same dtype, C >= T.
        window: tokens that each sees, its own included; all if None.
        held: of a packed cache, whose tokens are before all of the call; C is T then.
        threads: number of threads, torch's if None. The results do not depend on it.
        log_mass: [B, T, H G] float32, to which the logarithm of the sum of all softmax terms is written.

    Returns:
        [B, T, H G, D] in the dtype of the queries.
    """
    batch, query_heads, count, width = query.shape
    tensors = tensors_of(query, key, value, log_mass)
    threads = torch.get_num_threads() if threads is None else threads
    shape = (width, batch, key.shape[1], query_heads, count, key.shape[2])
    narrow = query.dtype == torch.bfloat16
    seen = NO_WINDOW if window is None else min(window, NO_WINDOW)
    library.prompt(held, views(*tensors), *shape, seen, threads, narrow, scale * LOG2_E)  # the kernels have powers of 2
    return tensors[3]
