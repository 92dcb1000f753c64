"""Whether a request can ever run, and how many tokens it may then produce."""

from pagedserve.policy.errors import EmptyPrompt, InvalidLimit, PromptExceedsModel, PromptExceedsPool
from pagedserve.policy.limits import Limits
from pagedserve.policy.request import Request


def admissible_limit(request: Request, limits: Limits) -> int:
    """Output tokens after which the request ends with "length".

    The least of ``max_tokens``, the model's room and the pool's room, were it alone: an output that would
    outgrow the pool ends there and never preempts itself for ever. The last sampled token needs no KV slot.
    Raises a `RequestRefused` naming the numbers when there is no room for the prompt and one output token.
    """
    prompt = request.num_prompt_tokens
    if prompt < 1:
        raise EmptyPrompt(f"request {request.id} has {prompt} prompt tokens; send at least 1")
    if request.max_tokens < 1:
        raise InvalidLimit(f"request {request.id} has max_tokens {request.max_tokens}; ask for at least 1")
    if prompt >= limits.max_model_len:
        raise PromptExceedsModel(
            f"request {request.id} has {prompt} prompt tokens; max_model_len is {limits.max_model_len}, "
            f"prompt and output together: shorten the prompt to {limits.max_model_len - 1} or fewer"
        )
    if prompt > limits.num_slots:
        raise PromptExceedsPool(
            f"request {request.id} has {prompt} prompt tokens and needs "
            f"{-(-prompt // limits.block_size)} KV blocks; the pool has {limits.num_blocks} of "
            f"{limits.block_size} tokens: shorten the prompt or raise num_blocks"
        )
    keys, full = request.prefix_keys, prompt // limits.block_size
    if keys is not None and len(keys) != full:
        raise InvalidLimit(
            f"request {request.id} has {len(keys)} prefix keys; {prompt} prompt tokens have {full} full blocks "
            f"of {limits.block_size}: give one key for each"
        )
    return min(request.max_tokens, limits.max_model_len - prompt, limits.num_slots - prompt + 1)
