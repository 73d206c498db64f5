"""Several processes that train one set of maps, as torchrun starts them; alone where it did not."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Processes:
    """This process's place among those that train together."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0

    @property
    def leads(self) -> bool:
        """Whether this process evaluates, logs and writes."""
        return self.rank == 0

    def device(self) -> torch.device | None:
        """The GPU of this process; None where there is none or no choice to make."""
        if self.world == 1 or not torch.cuda.is_available():
            return None
        return torch.device("cuda", self.local_rank)

    def share(self, count: int) -> range:
        """Which of `count` parallel sequences are this process's.

        Raises:
            ValueError: they cannot be shared evenly.
        """
        if count % self.world:
            raise ValueError(f"phi.sequences_per_step ({count}) must be a multiple of the {self.world} processes")
        return range(self.rank, count, self.world)

    @torch.no_grad()
    def start_equal(self, module: nn.Module) -> None:
        """Gives every process the leading one's parameters."""
        if self.world > 1:
            for parameter in module.parameters():
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

    def gather(self, mine: dict[str, Any]) -> dict[str, Any]:
        """The union of every process's entries."""
        if self.world == 1:
            return mine
        parts: list[Any] = [None] * self.world
        dist.all_gather_object(parts, mine)
        return {name: value for part in parts for name, value in part.items()}

    def wait(self) -> None:
        """Until every process has come here."""
        if self.world > 1:
            dist.barrier()

    def any_of(self, flags: Sequence[bool], device: torch.device) -> list[bool]:
        """Of each flag, whether any process has it set, so that all act together; one message for all."""
        if self.world == 1:
            return list(flags)
        votes: Tensor = torch.tensor(flags, dtype=torch.float32, device=device)
        dist.all_reduce(votes)
        return [vote > 0 for vote in votes.tolist()]


@contextmanager
def processes() -> Iterator[Processes]:
    """Joins the group that torchrun set up, if it did, and leaves it again."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Processes()
        return
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    yield Processes(dist.get_rank(), world, local_rank)
    dist.destroy_process_group()  # not after an error, when it might wait for processes that wait for this one
