"""The input of one forward pass: the tokens of a step, flattened, and where they live in the KV cache."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pagedserve.kernels.attention import PagedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch(PagedBatch):
    """T tokens of S sequences, sequence after sequence, without padding; see ``PagedBatch`` for the rest."""

    token_ids: torch.Tensor
    """[T] int64."""
    positions: torch.Tensor
    """[T] int64: the place of each token in its sequence, from 0."""

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """Tokens of one sequence to compute in a step: ``token_ids`` stand at ``start``, ``start + 1``, ...

    ``block_ids`` covers at least positions 0 to ``start + len(token_ids) - 1``.
    """

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]


def make_batch(
    chunks: Sequence[SequenceChunk], block_size: int, device: torch.device | str = "cpu"
) -> ForwardBatch:
    """Lay out ``chunks`` as one batch. Raises ``ValueError`` naming a chunk that is empty or lacks blocks."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    query_start = [0]
    width = max((len(chunk.block_ids) for chunk in chunks), default=0)
    tables = torch.zeros((len(chunks), width), dtype=torch.int32)
    for index, chunk in enumerate(chunks):
        end = chunk.start + len(chunk.token_ids)
        if not chunk.token_ids or end > len(chunk.block_ids) * block_size:
            raise ValueError(
                f"chunk {index}: {len(chunk.token_ids)} tokens from position {chunk.start} "
                f"on {len(chunk.block_ids)} blocks of {block_size}; it needs a token, and a slot for each"
            )
        tokens.extend(chunk.token_ids)
        positions.extend(range(chunk.start, end))
        slots.extend(
            chunk.block_ids[p // block_size] * block_size + p % block_size for p in range(chunk.start, end)
        )
        query_start.append(len(tokens))
        tables[index, : len(chunk.block_ids)] = torch.tensor(chunk.block_ids, dtype=torch.int32)
    return ForwardBatch(
        token_ids=torch.tensor(tokens, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        block_tables=tables.to(device),
        query_start=torch.tensor(query_start, dtype=torch.int32, device=device),
        context_lens=torch.tensor([chunk.start for chunk in chunks], dtype=torch.int32, device=device),
        max_query_len=max((len(chunk.token_ids) for chunk in chunks), default=0),
        max_context_len=max((chunk.start for chunk in chunks), default=0),
        num_decodes=next((i for i, c in enumerate(reversed(chunks)) if len(c.token_ids) > 1), len(chunks)),
    )
