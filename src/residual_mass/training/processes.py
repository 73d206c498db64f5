"""Processes that train one set of maps together under torchrun, and signals that ask them to stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import torch
import torch.distributed as dist
from torch import nn

SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Sent by batch systems before they kill a job, and by Ctrl-C."""


@dataclass(frozen=True)
class Processes:
    """Rank of this process in the group that trains together."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0

    @property
    def leads(self) -> bool:
        """Whether this process evaluates, logs and writes."""
        return self.rank == 0

    def device(self) -> torch.device | None:
        """Returns the GPU of this process; None without GPUs or with a single process."""
        return torch.device("cuda", self.local_rank) if self.world > 1 and torch.cuda.is_available() else None

    def share(self, count: int) -> range:
        """Returns which of `count` parallel sequences belong to this process.

        Raises:
            ValueError: they cannot be divided evenly.
        """
        if count % self.world:
            raise ValueError(f"phi.sequences_per_step ({count}) must be a multiple of the {self.world} processes")
        return range(self.rank, count, self.world)

    def start_equal(self, module: nn.Module) -> None:
        """Copies the leading process's parameters to all processes."""
        for parameter in module.parameters() if self.world > 1 else ():
            dist.broadcast(parameter.data, 0)

    @torch.no_grad()
    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replaces gradients by their sums over the processes, in one message."""
        if self.world == 1:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        together = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(together)
        for gradient, total in zip(gradients, together.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(total.view_as(gradient))

    def wait(self) -> None:
        """Waits until every process has arrived here."""
        if self.world > 1:
            dist.barrier()

    def any_of(self, flags: Sequence[bool], device: torch.device) -> list[bool]:
        """Returns for each flag whether any process has set it, in one message, so that all processes act together."""
        if self.world == 1:
            return list(flags)
        votes = torch.tensor(flags, dtype=torch.float32, device=device)
        dist.all_reduce(votes)
        return [vote > 0 for vote in votes.tolist()]


@contextmanager
def processes() -> Iterator[Processes]:
    """Joins the process group if torchrun set one up, and leaves it on exit."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Processes()
        return
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    yield Processes(dist.get_rank(), world, local_rank)
    dist.destroy_process_group()  # not after an error: it might deadlock with processes that wait for this one


class StopSignals:
    """Context that defers `SIGNALS`. Several signals count as one, because torchrun repeats those that a batch system
    sends to all processes.

    Attributes:
        asked: whether a signal has arrived.
    """

    def __init__(self) -> None:
        self._first: int = signal.SIGTERM  # used if only another process was asked
        self.asked = False

    def __enter__(self) -> StopSignals:
        self.asked = False
        heeded = (number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN)
        self._former = {number: signal.signal(number, self._note) for number in heeded}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def take_effect(self) -> None:
        """Delivers the first signal to its original handler."""
        signal.signal(self._first, self._former.get(self._first, signal.SIG_DFL))
        signal.raise_signal(self._first)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.asked:
            self.asked, self._first = True, number
