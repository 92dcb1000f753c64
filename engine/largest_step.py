"""The largest step that limits allow, on made-up tokens: what it takes of a device is what has to be kept free."""

from __future__ import annotations

import torch

from pagedserve.engine.model.batch import ForwardBatch
from pagedserve.engine.model.model import Model
from pagedserve.policy import Limits


@torch.inference_mode()
def largest_step(model: Model, limits: Limits) -> torch.Tensor:
    """Run prefills that fill the token budget; return logits of ``max_num_seqs`` rows. Every rank calls it."""
    kv = model.make_cache(1, limits.block_size)
    whole, rest = divmod(limits.max_num_batched_tokens, limits.max_model_len)
    lengths = [limits.max_model_len] * whole + [rest] * (rest > 0)
    hidden = model.forward(_prompts(lengths, kv.zero_block, limits.block_size, model.device), kv)
    rows = torch.arange(limits.max_num_seqs, device=hidden.device) % len(hidden)
    return model.logits(hidden[rows])


def _prompts(lengths: list[int], block: int, block_size: int, device: torch.device) -> ForwardBatch:
    """Whole prompts of these lengths, all on one block."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    count, longest = int(ends[-1]), max(lengths)
    positions = torch.arange(count) - torch.repeat_interleave(ends[:-1], torch.tensor(lengths))
    tables = torch.full((len(lengths), -(-longest // block_size)), block, dtype=torch.int32)
    return ForwardBatch(
        token_ids=torch.zeros(count, dtype=torch.int64, device=device),
        positions=positions.to(device),
        slot_mapping=torch.full((count,), block * block_size, dtype=torch.int64, device=device),
        block_tables=tables.to(device),
        query_start=ends.to(torch.int32).to(device),
        context_lens=torch.zeros(len(lengths), dtype=torch.int32, device=device),
        max_query_len=longest,
        max_context_len=0,
    )
