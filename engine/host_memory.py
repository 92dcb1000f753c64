"""Host memory for preemption by swapping, as it is asked for; free of torch."""

from __future__ import annotations

from dataclasses import dataclass

from pagedserve.policy import Policy
from pagedserve.policy.swap import SwapToHost

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory for KV blocks as it is asked for: by number, or by GiB on each rank (``swap_space``)."""

    num_cpu_blocks: int | None = None
    swap_space: float | None = None

    def check(self, policy: Policy) -> None:
        """ValueError if it is asked for twice, if the policy would never use it, or if the policy needs some."""
        if (self.swap_space or 0) < 0:
            raise ValueError(f"swap_space is {self.swap_space:g} GiB; it must be at least 0")
        given = {"num_cpu_blocks": self.num_cpu_blocks, "swap_space": self.swap_space}
        named = [f"{name} is {value:g}" for name, value in given.items() if value]
        if len(named) > 1:
            raise ValueError(f"{' and '.join(named)}: both size the host memory; give one of them")
        if named and not policy.can_swap:
            raise ValueError(
                f"{named[0]} and preemption_mode is recompute, which uses none: leave it out, or swap"
            )
        if not named and isinstance(policy.part("preemption_mode"), SwapToHost):
            raise ValueError(
                "preemption_mode is swap, which needs host memory: give num_cpu_blocks or swap_space"
            )

    def num_blocks(self, block_bytes: int) -> int:
        """Host blocks of ``block_bytes`` each. ValueError if not one fits the GiB asked for."""
        if not self.swap_space:
            return self.num_cpu_blocks or 0
        found = int(self.swap_space * GIB) // block_bytes
        if not found:
            raise ValueError(
                f"swap_space is {self.swap_space:g} GiB and one KV block takes {block_bytes / GIB:.6f}: raise it"
            )
        return found
