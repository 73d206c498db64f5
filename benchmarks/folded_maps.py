"""Feature maps with their linear chains multiplied out, against the maps as the paper writes them; same outputs."""

from __future__ import annotations

import argparse

import torch
from timing import alternate, report
from torch import Tensor

from residual_mass.core.feature_maps import ReZeroMap

LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM, D_PHI = 30, 9, 3, 64, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--d-emb", type=int, default=512, help="inner width; the paper's is 512")
    parser.add_argument("--keys", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.get_num_threads()} threads, d_emb {options.d_emb}, d_phi {D_PHI}, head dimension {HEAD_DIM}")
    decode(options.d_emb, options.rounds)
    training(options.d_emb, options.keys, options.rounds)


@torch.no_grad()
def decode(d_emb: int, rounds: int) -> None:
    """phi_q of one decode step: every query head of every layer maps one vector."""
    maps = [_map(QUERY_HEADS, d_emb) for _ in range(LAYERS)]
    folded = [m.fold() for m in maps]
    x = torch.randn(LAYERS, QUERY_HEADS, 1, HEAD_DIM)

    def as_written() -> list[Tensor]:
        return [m.unfolded(v) for m, v in zip(maps, x, strict=True)]

    def multiplied_out() -> list[Tensor]:
        return [m(v) for m, v in zip(folded, x, strict=True)]

    torch.testing.assert_close(multiplied_out(), as_written(), rtol=1e-3, atol=1e-4)
    title = f"decode: {LAYERS * QUERY_HEADS} query maps, one vector each"
    report(title, alternate({"as written": as_written, "folded": multiplied_out}, rounds))


def training(d_emb: int, keys: int, rounds: int) -> None:
    """phi_k of one layer forward and backward, fold included."""
    module = _map(KV_HEADS, d_emb)
    x = torch.randn(KV_HEADS, keys, HEAD_DIM)
    weight = torch.randn(KV_HEADS, keys, D_PHI)
    parameters = list(module.parameters())

    def as_written() -> tuple[Tensor, ...]:
        return torch.autograd.grad((module.unfolded(x) * weight).sum(), parameters)

    def folded() -> tuple[Tensor, ...]:
        return torch.autograd.grad((module(x) * weight).sum(), parameters)

    for ours, expected in zip(folded(), as_written(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-2, atol=1e-3 * float(expected.abs().max()))
    title = f"training: {KV_HEADS} key maps, {keys} keys, forward and backward"
    report(title, alternate({"as written": as_written, "folded": folded}, rounds))


def _map(heads: int, d_emb: int) -> ReZeroMap:
    module = ReZeroMap(heads, HEAD_DIM, d_emb, D_PHI)
    module.alpha.data.fill_(0.5)
    return module


if __name__ == "__main__":
    main()
