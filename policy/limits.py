"""The numbers of a device and a model within which a policy decides."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Capacities, under vLLM's names.

    ``max_num_batched_tokens`` tokens computed in one step; ``max_num_seqs`` requests running at once;
    ``max_model_len`` prompt plus output tokens of one request; ``block_size`` tokens in a KV block;
    ``num_blocks`` KV blocks in the pool; ``max_num_queued_reqs`` requests that may wait (None: no limit).
    """

    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    max_model_len: int = 32768
    block_size: int = 16
    num_blocks: int = 8192
    max_num_queued_reqs: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs", "block_size", "num_blocks"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len is {self.max_model_len}; a prompt and an output token need 2")
        if self.max_num_queued_reqs is not None and self.max_num_queued_reqs < 1:
            raise ValueError(f"max_num_queued_reqs is {self.max_num_queued_reqs}; use 1 or more, or None")
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs {self.max_num_seqs} exceeds max_num_batched_tokens "
                f"{self.max_num_batched_tokens}: a decode step of all sequences would not fit; "
                "raise the token budget or lower max_num_seqs"
            )

    @property
    def num_slots(self) -> int:
        """Tokens that the whole pool can hold."""
        return self.num_blocks * self.block_size
