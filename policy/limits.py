"""The numbers of a device and a model within which a policy decides, and who can ever run within them."""

from dataclasses import dataclass

from pagedserve.policy.errors import EmptyPrompt, InvalidLimit, PromptExceedsModel, PromptExceedsPool
from pagedserve.policy.request import Request


@dataclass(frozen=True, slots=True)
class Limits:
    """Capacities, under vLLM's names.

    ``max_num_batched_tokens`` tokens computed in one step; ``max_num_seqs`` requests running at once;
    ``max_model_len`` prompt plus output tokens of one request; ``block_size`` tokens in a KV block;
    ``num_blocks`` KV blocks in the pool; ``max_num_queued_reqs`` requests that may wait (None: no limit);
    ``num_cpu_blocks`` KV blocks in host memory, for preemption by swapping.
    """

    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    max_model_len: int = 32768
    block_size: int = 16
    num_blocks: int = 8192
    max_num_queued_reqs: int | None = None
    num_cpu_blocks: int = 0

    def __post_init__(self) -> None:
        for name in (
            "max_num_batched_tokens",
            "max_num_seqs",
            "block_size",
            "num_blocks",
            "max_num_queued_reqs",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.num_cpu_blocks < 0:
            raise ValueError(f"num_cpu_blocks is {self.num_cpu_blocks}; it must be at least 0")
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len is {self.max_model_len}; a prompt and an output token need 2")
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs {self.max_num_seqs} exceeds max_num_batched_tokens "
                f"{self.max_num_batched_tokens}: a decode step of all would not fit; raise the token budget"
            )

    @property
    def num_slots(self) -> int:
        """Tokens that the whole pool can hold."""
        return self.num_blocks * self.block_size

    def output_limit(self, request: Request) -> int:
        """Output tokens after which the request ends with "length".

        The least of ``max_tokens``, the model's room and the pool's room, were it alone: an output that would
        outgrow the pool ends there and never preempts itself for ever. The last token sampled needs no slot.
        Raises a `RequestRefused` naming the numbers if there is no room for the prompt and one output token.
        """
        who, prompt = f"request {request.id}", request.num_prompt_tokens
        if prompt < 1:
            raise EmptyPrompt(f"{who} has {prompt} prompt tokens; send at least 1")
        if request.max_tokens < 1:
            raise InvalidLimit(f"{who} has max_tokens {request.max_tokens}; ask for at least 1")
        if prompt >= self.max_model_len:
            raise PromptExceedsModel(
                f"{who} has {prompt} prompt tokens; max_model_len is {self.max_model_len}, prompt and output "
                f"together: shorten the prompt to {self.max_model_len - 1} or fewer"
            )
        if prompt > self.num_slots:
            raise PromptExceedsPool(
                f"{who} has {prompt} prompt tokens and needs {-(-prompt // self.block_size)} KV blocks; the "
                f"pool has {self.num_blocks} of {self.block_size} tokens: shorten it or raise num_blocks"
            )
        keys, full = request.prefix_keys, prompt // self.block_size
        if keys is not None and len(keys) != full:
            raise InvalidLimit(
                f"{who} has {len(keys)} prefix keys; its {prompt} prompt tokens have {full} full blocks of "
                f"{self.block_size}: give one key for each"
            )
        return min(request.max_tokens, self.max_model_len - prompt, self.num_slots - prompt + 1)
