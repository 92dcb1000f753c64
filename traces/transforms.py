"""Replay options: each function returns a new trace whose report says what was done to how many rows.

Block ids stay true under all of them: equal ids still mean equal prefixes (see `scale_lengths`,
`clip_lengths`). Clocks are in seconds of the trace's own time; only `rebase` and the time-scaling functions
change arrivals.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from pagedserve.traces.blocks import BlockIds, IntArray
from pagedserve.traces.report import MAX_EXAMPLES, Example, Kind, Tally, TraceError
from pagedserve.traces.trace import MAX_TOKENS_PER_ROW, Trace

MAX_SCALED_NS = 2**53
"""Scaled arrivals stay below 2**53 ns (104 days), where float64 still counts single nanoseconds."""


def window(trace: Trace, start_s: float = 0.0, end_s: float | None = None) -> Trace:
    """The requests that arrive in [start_s, end_s); None: to the end. Their times are kept: see `rebase`."""
    start_ns = _nanoseconds("start_s", start_s)
    end_ns = None if end_s is None else _nanoseconds("end_s", end_s)
    if end_ns is not None and end_ns <= start_ns:
        raise TraceError(f"the window must end after it starts, not run from {start_s} to {end_s} s")
    inside = trace.arrival_ns >= start_ns
    if end_ns is not None:
        inside &= trace.arrival_ns < end_ns
    shown_end = "end" if end_s is None else f"{end_s:g}"
    return _keep(trace, inside, f"window({start_s:g}, {shown_end}) s", "outside the window", "arrival_ns")


def first(trace: Trace, num_requests: int) -> Trace:
    """The first ``num_requests`` requests, or all if there are fewer."""
    if num_requests < 1:
        raise TraceError(f"the number of requests to keep must be at least 1, not {num_requests}")
    inside = np.arange(len(trace)) < num_requests
    return _keep(trace, inside, f"first({num_requests})", f"after the first {num_requests}", "arrival_ns")


def rebase(trace: Trace) -> Trace:
    """The same requests with the first arrival at 0; the report's ``origin_ns`` moves along."""
    shift = int(trace.arrival_ns[0]) if len(trace) else 0
    report = trace.report.extended(f"rebase: {shift} ns earlier", len(trace))
    report = replace(report, origin_ns=report.origin_ns + shift)
    return replace(trace, arrival_ns=trace.arrival_ns - shift, report=report)


def scale_time(trace: Trace, factor: float) -> Trace:
    """All arrival times multiplied by ``factor``, to the nearest nanosecond: 2 halves the rate."""
    _check_factor("factor", factor)
    latest = int(trace.arrival_ns[-1]) if len(trace) else 0
    if max(latest, latest * factor) > MAX_SCALED_NS:
        raise TraceError(
            f"scaling by {factor:g} needs arrivals below {MAX_SCALED_NS} ns (104 days) before and after, but "
            f"the last is at {latest} ns; rebase the trace or take a window first"
        )
    arrivals = np.rint(trace.arrival_ns * factor).astype(np.int64)
    return replace(
        trace, arrival_ns=arrivals, report=trace.report.extended(f"scale_time({factor:g})", len(trace))
    )


def with_rate(trace: Trace, rate: float) -> Trace:
    """The trace with its time scaled so that requests / span, as in `Trace.describe`, is ``rate`` per second.

    Raises `TraceError` if all requests arrive at one instant.
    """
    _check_factor("rate", rate)
    present = trace.describe().rate_per_s
    if present is None:
        raise TraceError(f"a rate needs two different arrival times, which these {len(trace)} requests lack")
    return scale_time(trace, present / rate)


def scale_lengths(trace: Trace, factor: float, *, output_factor: float | None = None) -> Trace:
    """Lengths multiplied by ``factor`` (outputs by ``output_factor`` if given), at least 1 token each.

    Without block ids lengths are rounded to the nearest token. With ids the *blocks* are scaled: the ids
    stay, and each stands for ``block_size * factor`` tokens, which must be a whole number; prompts are
    rounded up. So every prompt keeps its number of blocks, equal ids mean equal prefixes as before, and the
    shared share of each prompt is unchanged. (Cutting or appending blocks instead would make prompts share
    more or less.)
    """
    output_factor = factor if output_factor is None else output_factor
    _check_factor("factor", factor)
    _check_factor("output_factor", output_factor)
    blocks = trace.blocks
    if blocks is None:
        prompts, raised = _scaled(trace.num_prompt_tokens, factor)
    else:
        new_size = _scaled_block_size(blocks.block_size, factor)
        prompts = -(-trace.num_prompt_tokens * new_size // blocks.block_size)
        raised = np.zeros(0, dtype=np.int64)
        blocks = BlockIds(new_size, blocks.ids, blocks.offsets)
    outputs, raised_outputs = _scaled(trace.num_output_tokens, output_factor)
    longest = max(prompts.max(initial=0), outputs.max(initial=0))
    if longest > MAX_TOKENS_PER_ROW:
        raise TraceError(f"scaling gives {longest} tokens in a row; the most is {MAX_TOKENS_PER_ROW}")
    reason = "scaled to half a token or less, raised to 1"
    report = trace.report.extended(
        f"scale_lengths({factor:g}, output_factor={output_factor:g})",
        len(trace),
        [
            _tally(trace, "changed", reason, raised, "num_prompt_tokens", trace.num_prompt_tokens),
            _tally(trace, "changed", reason, raised_outputs, "num_output_tokens", trace.num_output_tokens),
        ],
    )
    return replace(trace, num_prompt_tokens=prompts, num_output_tokens=outputs, blocks=blocks, report=report)


def clip_lengths(
    trace: Trace,
    max_prompt: int | None = None,
    max_total: int | None = None,
    mode: Literal["clip", "drop"] = "clip",
) -> Trace:
    """Bound prompts by ``max_prompt`` and prompt + output by ``max_total`` tokens; None: no bound.

    "drop" leaves out every request over a bound. "clip" shortens it: first the prompt to ``max_prompt``, then
    the prompt to ``max_total - 1``, then the output to what is left, so that one output token always remains.
    A prompt loses its end, and its block ids with it; the id of a block cut in two stays, for what remains of
    it still equals the start of that block elsewhere.
    """
    if mode not in ("clip", "drop"):
        raise TraceError(f'mode must be "clip" or "drop", not {mode!r}')
    if max_prompt is not None and max_prompt < 1:
        raise TraceError(f"max_prompt must leave at least 1 token, not {max_prompt}")
    if max_total is not None and max_total < 2:
        raise TraceError(f"max_total must leave a prompt and an output token, 2 in all, not {max_total}")
    step = f"clip_lengths(max_prompt={max_prompt}, max_total={max_total}, mode={mode})"
    change = _drop_over if mode == "drop" else _cut_over
    return change(trace, max_prompt, max_total, step)


def without_block_ids(trace: Trace) -> Trace:
    """The same requests with no word on which prompts share a prefix, so that nothing can be cached."""
    return replace(trace, blocks=None, report=trace.report.extended("without_block_ids", len(trace)))


def _cut_over(trace: Trace, max_prompt: int | None, max_total: int | None, step: str) -> Trace:
    """Shorten what is over a bound, in the order `clip_lengths` states; each cut is counted."""
    prompts, outputs, tallies = trace.num_prompt_tokens, trace.num_output_tokens, []
    bounds = [
        ("the prompt exceeded max_prompt", max_prompt),
        ("the prompt exceeded max_total - 1", None if max_total is None else max_total - 1),
    ]
    for reason, bound in bounds:
        if bound is not None:
            over = np.flatnonzero(prompts > bound)
            tallies.append(_tally(trace, "clipped", reason, over, "num_prompt_tokens", prompts))
            prompts = np.minimum(prompts, bound)
    if max_total is not None:
        over = np.flatnonzero(prompts + outputs > max_total)
        reason = "prompt + output exceeded max_total: output shortened"
        tallies.append(_tally(trace, "clipped", reason, over, "num_output_tokens", outputs))
        outputs = np.minimum(outputs, max_total - prompts)
    blocks = trace.blocks
    if blocks is not None:
        blocks = blocks.take(np.arange(len(trace)), -(-prompts // blocks.block_size))
    report = trace.report.extended(step, len(trace), tallies)
    return replace(trace, num_prompt_tokens=prompts, num_output_tokens=outputs, blocks=blocks, report=report)


def _drop_over(trace: Trace, max_prompt: int | None, max_total: int | None, step: str) -> Trace:
    """Leave out requests over a bound; one over both counts under the prompt bound."""
    prompts = trace.num_prompt_tokens
    totals = prompts + trace.num_output_tokens
    nothing = np.zeros(len(trace), dtype=bool)
    long_prompt = nothing if max_prompt is None else prompts > max_prompt
    long_total = nothing if max_total is None else (totals > max_total) & ~long_prompt
    by_prompt, by_total = np.flatnonzero(long_prompt), np.flatnonzero(long_total)
    tallies = [
        _tally(trace, "dropped", "the prompt exceeds max_prompt", by_prompt, "num_prompt_tokens", prompts),
        _tally(trace, "dropped", "prompt + output exceeds max_total", by_total, "total", totals),
    ]
    kept = trace.take(~(long_prompt | long_total))
    return replace(kept, report=trace.report.extended(step, len(kept), tallies))


def _keep(trace: Trace, inside: npt.NDArray[np.bool_], step: str, reason: str, field: str) -> Trace:
    kept = trace.take(inside)
    left_out = _tally(trace, "dropped", reason, np.flatnonzero(~inside), field, getattr(trace, field))
    return replace(kept, report=trace.report.extended(step, len(kept), [left_out]))


def _tally(trace: Trace, kind: Kind, reason: str, index: IntArray, field: str, values: IntArray) -> Tally:
    """Count the rows of an index, with the value of a field in the first of them."""
    examples = tuple(
        Example(trace.report.file, int(trace.row[i]), None, field, str(values[i]))
        for i in index[:MAX_EXAMPLES]
    )
    return Tally(kind, reason, len(index), examples)


def _scaled(tokens: IntArray, factor: float) -> tuple[IntArray, IntArray]:
    """Lengths times a factor, rounded, at least 1; and the indices that had to be raised to 1."""
    scaled = np.rint(tokens * factor)
    return np.maximum(scaled, 1).astype(np.int64), np.flatnonzero(scaled < 1)


def _scaled_block_size(block_size: int, factor: float) -> int:
    scaled = block_size * factor
    nearest = round(scaled)
    if nearest < 1 or abs(scaled - nearest) > 1e-9 * scaled:
        low, high = max(1, math.floor(scaled)), math.ceil(scaled)
        raise TraceError(
            f"with block ids, block size {block_size} x factor {factor:g} = {scaled:g} must be a whole "
            f"number of tokens: use a factor such as {low / block_size:.10g} or {high / block_size:.10g}, "
            "or drop the ids first with without_block_ids"
        )
    return nearest


def _nanoseconds(name: str, seconds: float) -> int:
    if not (math.isfinite(seconds) and seconds >= 0):
        raise TraceError(f"{name} must be a time of at least 0 s, not {seconds}")
    return round(seconds * 1_000_000_000)


def _check_factor(name: str, factor: float) -> None:
    if not (math.isfinite(factor) and factor > 0):
        raise TraceError(f"{name} must be a finite number above 0, not {factor}")
