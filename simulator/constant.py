"""Step times that are fixed numbers: for queueing tests and for teaching."""

from dataclasses import asdict, dataclass
from typing import Any

from pagedserve.policy.plan import StepShape
from pagedserve.simulator.cost import Int64Array, ShapeBatch, chunk_features


@dataclass(frozen=True, slots=True)
class ConstantCost:
    """``base_ns`` a step, plus so much for every prefill token, decode and swapped block; integer arithmetic only.

    ``ConstantCost(base_ns)`` alone turns a replica that runs one request a step into the textbook server
    with deterministic service. Raises ValueError for a negative number, TypeError for one that is not int.
    """

    base_ns: int
    per_prefill_token_ns: int = 0
    per_decode_ns: int = 0
    host_base_ns: int = 0
    per_swapped_block_ns: int = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} is {value!r}; times are whole nanoseconds (int)")
            if value < 0:
                raise ValueError(f"{name} is {value}; it must not be negative")

    def step_ns(self, shape: StepShape) -> int:
        num_prefill_tokens = chunk_features(shape.chunks)[0]
        return (
            self.base_ns
            + self.per_prefill_token_ns * num_prefill_tokens
            + self.per_decode_ns * shape.num_decodes
            + self.per_swapped_block_ns * (shape.num_blocks_swapped_out + shape.num_blocks_swapped_in)
        )

    def steps_ns(self, batch: ShapeBatch) -> Int64Array:
        return (
            self.base_ns
            + self.per_prefill_token_ns * batch.num_chunk_tokens
            + self.per_decode_ns * batch.num_decodes
            + self.per_swapped_block_ns * (batch.num_blocks_swapped_out + batch.num_blocks_swapped_in)
        )

    def host_ns(self, shape: StepShape) -> int:
        return self.host_base_ns

    def hosts_ns(self, batch: ShapeBatch) -> Int64Array:
        return self.host_base_ns + 0 * batch.num_decodes

    def check_swaps(self, block_size: int) -> None:
        """Every block costs what the caller said."""

    def describe(self) -> dict[str, Any]:
        return {"name": "constant", "parameters": asdict(self), "sources": {"all": "set by the caller"}}

    @property
    def num_extrapolated(self) -> int:
        return 0
