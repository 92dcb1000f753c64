"""What a step may still spend."""

from dataclasses import dataclass

from pagedserve.policy.blocks import Allocator
from pagedserve.policy.errors import IllegalPlan


@dataclass(slots=True)
class StepBudgetState:
    """Tokens and seats left in the step being composed; blocks are the allocator's own count.

    Every choice takes from it and undoing one gives back the same, so a step can never be over budget.
    """

    num_tokens: int
    num_seats: int
    allocator: Allocator

    @property
    def num_blocks(self) -> int:
        """KV blocks that can be given out now."""
        return self.allocator.num_free_blocks

    def take(self, who: object, num_tokens: int, num_seats: int = 0) -> None:
        """Spend, or raise `IllegalPlan` naming the class that overspends."""
        if num_tokens > self.num_tokens or num_seats > self.num_seats:
            raise IllegalPlan(
                f"{type(who).__name__} asked for {num_tokens} tokens and {num_seats} seats; "
                f"the step has {self.num_tokens} tokens and {self.num_seats} seats left"
            )
        self.num_tokens -= num_tokens
        self.num_seats -= num_seats

    def give_back(self, num_tokens: int, num_seats: int) -> None:
        """Undo a choice."""
        self.num_tokens += num_tokens
        self.num_seats += num_seats
