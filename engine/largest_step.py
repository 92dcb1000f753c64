"""The largest step that limits allow, on made-up tokens: what it takes of a device is what has to be kept free.

It is prefills that fill the token budget, prompt logprobs of all of them, and then a choice for every seat, by the
filter that takes most scratch, with penalties and logprobs. What requests may add to it is little: 16 bytes for each
of the likeliest tokens beyond `NUM_TOP`, and 28 for each token that is penalised.
"""

from __future__ import annotations

import torch

from pagedserve.engine.model.batch import ForwardBatch
from pagedserve.engine.model.model import Model
from pagedserve.engine.params import SamplingParams
from pagedserve.engine.prompt_logprobs import PromptRows
from pagedserve.engine.sampling.rows import SamplingRows
from pagedserve.engine.sampling.sampler import sample
from pagedserve.policy import Limits

NUM_TOP = 20
"""Likeliest tokens of every logprob: the most of OpenAI's API."""


@torch.inference_mode()
def largest_step(model: Model, limits: Limits) -> None:
    """Run it; every rank calls it, and all but the first choose among their own part of the vocabulary."""
    kv = model.make_cache(1, limits.block_size)
    whole, rest = divmod(limits.max_num_batched_tokens, limits.max_model_len)
    lengths = [limits.max_model_len] * whole + [rest] * (rest > 0)
    hidden = model.forward(_prompts(lengths, kv.zero_block, limits.block_size, model.device), kv)
    vocab_size, num_top = model.config.vocab_size, min(NUM_TOP, model.local.vocab_size)
    PromptRows(0, 0, (0,) * len(hidden), num_top).logprobs(model, hidden, vocab_size)
    rows = torch.arange(limits.max_num_seqs, device=hidden.device) % len(hidden)
    logits = model.logits(hidden[rows])
    sample_all(logits, min(vocab_size, logits.shape[1]), num_top)


@torch.inference_mode()
def sample_all(logits: torch.Tensor, vocab_size: int, num_top: int) -> None:
    """Choose a token of each row by the filter that takes most scratch, and report its logprobs."""
    rows, ids = SamplingRows(vocab_size, logits.device), tuple(range(len(logits)))
    for row in ids:
        params = SamplingParams(top_p=0.9, frequency_penalty=0.1, logprobs=num_top)
        rows.add(row, params, seed=row, prompt_ids=())
    found = sample(logits, rows.select(ids, [1] * len(ids)))
    found.errors()
    found.logprobs()


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
