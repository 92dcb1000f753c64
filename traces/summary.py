"""What a trace is like: rates, lengths, and what an infinite prefix cache would find in it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedserve.traces.blocks import BlockIds, IntArray

if TYPE_CHECKING:
    from pagedserve.traces.trace import Trace


@dataclass(frozen=True, slots=True)
class LengthSummary:
    """Mean, median, 99th percentile (linear) and maximum of a length, in tokens."""

    mean: float
    median: float
    p99: float
    max: int

    def __str__(self) -> str:
        return f"mean {self.mean:,.1f}, median {self.median:,.1f}, p99 {self.p99:,.1f}, max {self.max:,}"


@dataclass(frozen=True, slots=True)
class PrefixSummary:
    """What an infinite prefix cache finds when requests are served one after another, in trace order.

    A request hits its leading blocks up to the first one that no earlier request had. ``num_hit_tokens``
    counts in a hit block what an earlier request really had of it, and no more than the prompt holds, so a
    partial last block counts as its tokens.
    """

    block_size: int
    num_blocks: int
    num_hit_blocks: int
    num_prompt_tokens: int
    num_hit_tokens: int

    @property
    def hit_share(self) -> float:
        """Blocks hit / blocks, partial last blocks included."""
        return self.num_hit_blocks / self.num_blocks

    @property
    def hit_token_share(self) -> float:
        """Prompt tokens hit / prompt tokens."""
        return self.num_hit_tokens / self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """Numbers that describe a trace; None where too few requests leave a number undefined.

    ``span_s`` runs from the first to the last arrival and ``rate_per_s`` is requests / span. ``gap_cv`` is
    the coefficient of variation of the gaps between consecutive arrivals, population standard deviation /
    mean: 1 for Poisson arrivals, above for bursty ones.
    """

    num_requests: int
    span_s: float | None
    rate_per_s: float | None
    gap_cv: float | None
    prompt: LengthSummary | None
    output: LengthSummary | None
    prefix: PrefixSummary | None

    def lines(self) -> list[str]:
        """The summary as lines for a screen."""
        lines = [f"requests  {self.num_requests:,}"]
        if self.span_s is not None:
            lines.append(f"span      {self.span_s:,.1f} s")
        if self.rate_per_s is not None:
            lines.append(f"rate      {self.rate_per_s:,.4g} requests/s")
        if self.gap_cv is not None:
            lines.append(f"gap CV    {self.gap_cv:.3f}")
        if self.prompt is not None and self.output is not None:
            lines += [f"prompt    {self.prompt} tokens", f"output    {self.output} tokens"]
        if self.prefix is not None:
            found = self.prefix
            lines.append(
                f"prefix    {found.num_hit_blocks:,} of {found.num_blocks:,} blocks of {found.block_size} "
                f"({found.hit_share:.1%}; {found.hit_token_share:.1%} of tokens) seen before"
            )
        return lines

    def as_dict(self) -> dict[str, Any]:
        """The summary as plain values, for JSON."""
        values = asdict(self)
        if self.prefix is not None:
            values["prefix"] |= {
                "hit_share": self.prefix.hit_share,
                "hit_token_share": self.prefix.hit_token_share,
            }
        return values


def summarise(trace: Trace) -> TraceSummary:
    """The summary of a trace; see `TraceSummary` for the definitions."""
    gaps = np.diff(trace.arrival_ns)
    span_ns = int(trace.arrival_ns[-1] - trace.arrival_ns[0]) if len(trace) else None
    return TraceSummary(
        num_requests=len(trace),
        span_s=None if span_ns is None else span_ns / 1e9,
        rate_per_s=len(trace) / (span_ns / 1e9) if span_ns else None,
        gap_cv=float(gaps.std() / gaps.mean()) if span_ns else None,
        prompt=_lengths(trace.num_prompt_tokens),
        output=_lengths(trace.num_output_tokens),
        prefix=None
        if trace.blocks is None or not len(trace)
        else _prefix(trace.blocks, trace.num_prompt_tokens),
    )


def _lengths(tokens: IntArray) -> LengthSummary | None:
    if not len(tokens):
        return None
    median, p99 = np.percentile(tokens, [50, 99])
    return LengthSummary(float(tokens.mean()), float(median), float(p99), int(tokens.max()))


def _prefix(blocks: BlockIds, num_prompt_tokens: IntArray) -> PrefixSummary:
    """An id fixes its whole prefix, so blocks before a seen one were seen too: hits are leading."""
    request = np.repeat(np.arange(len(blocks)), blocks.counts)
    position = np.arange(len(blocks.ids)) - blocks.offsets[:-1][request]
    tokens = np.minimum(blocks.block_size, num_prompt_tokens[request] - position * blocks.block_size)
    _, first, inverse = np.unique(blocks.ids, return_index=True, return_inverse=True)
    seen = first[inverse] < np.arange(len(blocks.ids))
    hit_tokens = np.minimum(tokens, _most_before(inverse, tokens, blocks.block_size))
    return PrefixSummary(
        block_size=blocks.block_size,
        num_blocks=len(blocks.ids),
        num_hit_blocks=int(seen.sum()),
        num_prompt_tokens=int(num_prompt_tokens.sum()),
        num_hit_tokens=int(hit_tokens[seen].sum()),
    )


def _most_before(group: IntArray, tokens: IntArray, block_size: int) -> IntArray:
    """For each block but the first of its id, the most tokens any earlier block of that id holds."""
    order = np.argsort(group, kind="stable")
    # A running maximum that starts afresh at each group: groups ascend, each gets its own storey of values.
    storey = group[order] * (block_size + 1)
    highest = np.maximum.accumulate(storey + tokens[order]) - storey
    result = np.empty_like(highest)
    result[order] = np.concatenate(([0], highest[:-1]))
    return result
