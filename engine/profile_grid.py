"""What a profile measures: steps on a grid of shapes, as far as they fit the limits of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from pagedserve.policy import Limits, StepShape

SPLIT_TOKENS = 32
HOST_PROMPT, HOST_STEPS = 8, 16  # tokens of a prompt, and of an output, when host time is measured


@dataclass(frozen=True, slots=True)
class Point:
    """One step to measure: the contexts of its decodes, and (tokens, context) of its chunks.

    ``chunks_sample``: whether the chunks end their prompts, so that each has a token sampled.
    """

    kind: str
    decodes: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...]
    chunks_sample: bool = True

    @property
    def shape(self) -> StepShape:
        """The step as a cost model sees it."""
        return StepShape(
            self.chunks,
            len(self.decodes),
            sum(self.decodes),
            max(self.decodes, default=0),
            sum(context * context for context in self.decodes),
            len(self.decodes) + (len(self.chunks) if self.chunks_sample else 0),
        )

    def fits(self, limits: Limits) -> bool:
        """Whether a scheduler within ``limits`` could plan such a step."""
        known = [*(tokens + context for tokens, context in self.chunks), *(c + 1 for c in self.decodes)]
        return (
            max(known) < limits.max_model_len
            and sum(-(-length // limits.block_size) for length in known) <= limits.num_blocks
            and len(known) <= limits.max_num_seqs
            and len(self.decodes) + sum(tokens for tokens, _ in self.chunks) <= limits.max_num_batched_tokens
        )


@dataclass(frozen=True, slots=True)
class Grid:
    """What is measured. Chunks: lengths times contexts. Decodes: batch sizes times contexts, each also skewed.

    A skewed batch has the same total context, half of it, or as much as the model's length allows, in one
    sequence. Mixed steps combine each of ``mixed_chunks`` with each decode batch at the middle context.
    Every length is also measured without sampling, and ``split_chunks`` as that many chunks of
    ``SPLIT_TOKENS`` in one step: what the head and a further chunk cost. ``swap_blocks`` KV blocks are copied to
    host memory and back.
    """

    chunk_tokens: tuple[int, ...] = (1, 16, 32, 64, 128, 256, 512)
    chunk_contexts: tuple[int, ...] = (0, 512, 2048)
    decode_batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    decode_contexts: tuple[int, ...] = (16, 256, 1024, 2048)
    mixed_chunks: tuple[int, ...] = (16, 64, 256)
    split_chunks: tuple[int, ...] = (2, 4, 8)
    host_rows: tuple[int, ...] = (1, 8, 32, 64)
    swap_blocks: tuple[int, ...] = (1, 4, 16, 64, 256)

    @property
    def middle_context(self) -> int:
        """The decodes' context in mixed steps."""
        return self.decode_contexts[len(self.decode_contexts) // 2]

    def points(self, limits: Limits) -> list[Point]:
        """Every step of the grid, also those that do not fit ``limits``."""
        points: list[Point] = []
        longest = limits.max_model_len - 2
        for tokens in self.chunk_tokens:
            points += [Point("chunk", (), ((tokens, context),)) for context in self.chunk_contexts]
            points.append(Point("unsampled", (), ((tokens, 0),), chunks_sample=False))
        points += [Point("split", (), ((SPLIT_TOKENS, 0),) * count) for count in self.split_chunks]
        for batch in self.decode_batches:
            for context in self.decode_contexts:
                points.append(Point("decode", (context,) * batch, ()))
                # What is too long even when even is left out later, skewed or not.
                uneven = skewed(batch, context, longest if context < longest else batch * context)
                if max(uneven) > context:
                    points.append(Point("decode", uneven, ()))
            middle = (self.middle_context,) * batch
            points += [Point("mixed", middle, ((tokens, 0),)) for tokens in self.mixed_chunks]
        return points

    def fitting(self, limits: Limits) -> tuple[list[Point], list[int]]:
        """The steps that fit, and the ``host_rows`` that can be admitted in one step and then decode.

        ValueError if there are no steps or no rows.
        """
        points = [point for point in self.points(limits) if point.fits(limits)]
        most = min(
            limits.max_num_seqs,
            limits.num_blocks // -(-(HOST_PROMPT + HOST_STEPS) // limits.block_size),
            limits.max_num_batched_tokens // HOST_PROMPT,
        )
        has_room = limits.max_model_len > HOST_PROMPT + HOST_STEPS
        rows = [rows for rows in self.host_rows if rows <= most and has_room]
        if not points or not rows:
            raise ValueError(
                f"{len(points)} steps of the grid and {len(rows)} of its measurements of host time fit "
                f"max_model_len {limits.max_model_len}, max_num_seqs {limits.max_num_seqs}, "
                f"max_num_batched_tokens {limits.max_num_batched_tokens} and {limits.num_blocks} KV blocks of "
                f"{limits.block_size} tokens; both are needed: raise the limits"
            )
        return points, rows


GRIDS = {
    "standard": Grid(),
    "small": Grid(
        (1, 16, 64, 256, 512), (0, 512), (1, 4, 16, 32), (16, 512), (64,), (4,), (1, 8), (1, 16, 64)
    ),
}
"""Grids by name: the standard one for validation, a small one to try things out."""


def skewed(batch: int, context: int, longest: int) -> tuple[int, ...]:
    """Contexts of the same sum, half of it, but no more than ``longest``, in the last sequence."""
    total = batch * context
    if batch == 1 or context >= longest:
        return (context,) * batch
    rest = [max(1, (total - min(total // 2, longest)) // (batch - 1))] * (batch - 1)
    while total - sum(rest) > longest:  # what the division left over
        rest[rest.index(min(rest))] += 1
    return (*rest, total - sum(rest))
