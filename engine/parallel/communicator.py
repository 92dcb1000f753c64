"""What the ranks of one model say to each other while they compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch.nn import functional

from pagedserve.engine.parallel.shards import Shard


class Communicator(Protocol):
    """Called by every rank in the same order."""

    def embed(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Rows [T, D] of a table that is cut by rows, for int64 [T]."""
        ...

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place."""
        ...

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """[R, V / N] of every rank, side by side: [R, V], on rank 0; the others get their own back."""
        ...

    def share(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Rank 0's int64 [R] on every rank, in place of what the others have there."""
        ...

    def all(self, own: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks, of one shape, in order: [N, ...], on every rank."""
        ...


class Alone:
    """One rank: there is nothing to say."""

    def embed(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """See `Communicator.embed`."""
        return functional.embedding(token_ids, table)

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """See `Communicator.sum`."""
        return partial

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """See `Communicator.gather`."""
        return logits

    def share(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `Communicator.share`."""
        return token_ids

    def all(self, own: torch.Tensor) -> torch.Tensor:
        """See `Communicator.all`."""
        return own.unsqueeze(0)


ALONE = Alone()


@dataclass(frozen=True, slots=True)
class GroupCommunicator:
    """Over a `torch.distributed` process group: NCCL between GPUs, gloo on CPUs."""

    shard: Shard
    group: dist.ProcessGroup | None = None

    def embed(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """See `Communicator.embed`."""
        local = token_ids - self.shard.rank * len(table)
        is_here = (local >= 0) & (local < len(table))
        found = functional.embedding(local.masked_fill(~is_here, 0), table)
        return self.sum(found.masked_fill_(~is_here.unsqueeze(-1), 0.0))

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """See `Communicator.sum`."""
        partial = partial.contiguous()
        dist.all_reduce(partial, group=self.group)
        return partial

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """See `Communicator.gather`."""
        logits = logits.contiguous()
        is_first = self.shard.rank == 0
        parts = [torch.empty_like(logits) for _ in range(self.shard.size)] if is_first else None
        dist.gather(logits, parts, dst=0, group=self.group)
        return torch.cat(parts, dim=-1) if parts is not None else logits

    def share(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `Communicator.share`."""
        dist.broadcast(token_ids, 0, group=self.group)
        return token_ids

    def all(self, own: torch.Tensor) -> torch.Tensor:
        """See `Communicator.all`."""
        own = own.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.shard.size)]
        dist.all_gather(parts, own, group=self.group)
        return torch.stack(parts)
