"""Synthetic traces: gamma arrivals, lengths from stated distributions, shared prefixes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pagedserve.traces.blocks import BlockIds, IntArray
from pagedserve.traces.lengths import LengthDist, TraceLengths
from pagedserve.traces.report import TraceError, TraceReport
from pagedserve.traces.trace import Trace

_ARRIVALS, _PROMPTS, _OUTPUTS, _GROUPS = range(4)
"""One random stream each, so that another length distribution leaves the arrivals as they were."""


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Each request starts with the prefix of one of ``num_groups`` groups, drawn uniformly.

    ``prefix_tokens`` stand before the drawn prompt and add to its length. Only full blocks of the prefix are
    shared; all other block ids are the request's own.
    """

    num_groups: int
    prefix_tokens: int
    block_size: int = 16

    def __post_init__(self) -> None:
        if min(self.num_groups, self.prefix_tokens, self.block_size) < 1:
            raise TraceError(f"groups, prefix tokens and block size must be at least 1, not {self}")


def synthesize(
    num_requests: int,
    rate: float,
    *,
    burstiness: float = 1.0,
    prompt: LengthDist | None = None,
    output: LengthDist | None = None,
    lengths: TraceLengths | None = None,
    seed: int = 0,
    rescale: bool = False,
    prefixes: SharedPrefixes | None = None,
    name: str = "synthetic",
) -> Trace:
    """A trace of ``num_requests`` arriving at ``rate`` per second on average; equal arguments, equal trace.

    Gaps are independent gamma(shape=burstiness, scale=1 / (rate * burstiness)) seconds, as in vLLM's
    benchmark client: burstiness 1 is Poisson, below 1 burstier, ``math.inf`` evenly spaced; their CV is 1 /
    sqrt(burstiness). The clock starts one gap before the first request. ``rate`` may be ``math.inf``: all
    arrive at 0. With ``rescale`` arrivals are stretched so that the last is at exactly num_requests / rate,
    as that client does: the mean rate is then exact and the gaps are no longer independent.

    Lengths come from ``prompt`` and ``output``, or both together from ``lengths``. Random numbers are numpy's
    PCG64, one stream each for arrivals, prompts, outputs and prefix groups.
    """
    arrivals = arrival_times(num_requests, rate, burstiness, seed, rescale)
    given = (prompt is not None, output is not None, lengths is not None)
    if given not in ((True, True, False), (False, False, True)):
        raise TraceError(
            "give either both prompt and output distributions, or lengths, and not a mix of them"
        )
    prompts, outputs = _draw_lengths(num_requests, seed, prompt, output, lengths)
    blocks = None
    if prefixes is not None:
        prompts = prompts + prefixes.prefix_tokens
        blocks = _shared_blocks(prompts, prefixes, _stream(seed, _GROUPS))
    drawn = lengths or f"prompt={prompt}, output={output}"
    steps = (
        f"synthesize({num_requests}, rate={rate:g}, burstiness={burstiness:g}, {drawn}, seed={seed}, "
        f"rescale={rescale}, prefixes={prefixes})"
    )
    report = TraceReport(name, "synthetic", num_requests, num_requests, steps=(steps,))
    return Trace.of(name, arrivals, prompts, outputs, blocks=blocks, report=report)


def arrival_times(
    num_requests: int, rate: float, burstiness: float = 1.0, seed: int = 0, rescale: bool = False
) -> IntArray:
    """Arrival times in ns, int64, non-decreasing; see `synthesize` for the process."""
    if num_requests < 1:
        raise TraceError(f"a synthetic trace needs at least 1 request, not {num_requests}")
    if seed < 0:
        raise TraceError(f"the seed must be at least 0, not {seed}")
    for label, value in (("rate", rate), ("burstiness", burstiness)):
        if not value > 0:
            raise TraceError(f"{label} must be above 0 (math.inf is allowed), not {value}")
    if math.isinf(rate):
        return np.zeros(num_requests, dtype=np.int64)
    total_s = num_requests / rate
    if math.isinf(burstiness):
        arrivals_s = np.arange(1, num_requests + 1) / rate
    else:
        arrivals_s = np.cumsum(
            _stream(seed, _ARRIVALS).gamma(burstiness, 1 / (rate * burstiness), num_requests)
        )
        if rescale and arrivals_s[-1] > 0:
            arrivals_s *= total_s / arrivals_s[-1]
    arrivals = np.rint(arrivals_s * 1e9)
    if arrivals[-1] >= 2**62:
        raise TraceError(
            f"{num_requests} requests at {rate:g}/s take {total_s:g} s; the clock holds 146 years"
        )
    arrivals = arrivals.astype(np.int64)
    if rescale:
        last = round(total_s * 1e9)  # the float product above may miss it by its last digit
        arrivals = np.minimum(arrivals, last)
        arrivals[-1] = last
    return arrivals


def _draw_lengths(
    size: int, seed: int, prompt: LengthDist | None, output: LengthDist | None, lengths: TraceLengths | None
) -> tuple[IntArray, IntArray]:
    if lengths is not None:
        return lengths.sample_pairs(_stream(seed, _PROMPTS), size)
    assert prompt is not None
    assert output is not None
    return prompt.sample(_stream(seed, _PROMPTS), size), output.sample(_stream(seed, _OUTPUTS), size)


def _shared_blocks(prompts: IntArray, prefixes: SharedPrefixes, rng: np.random.Generator) -> BlockIds:
    """Ids for prompts that begin with a group's prefix: the groups' ids first, then each request's own."""
    num_shared = prefixes.prefix_tokens // prefixes.block_size
    group = rng.integers(prefixes.num_groups, size=len(prompts))
    counts = -(-prompts // prefixes.block_size)
    offsets = np.concatenate(([0], np.cumsum(counts)))
    position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
    shared = position < num_shared
    ids = np.repeat(group, counts) * num_shared + position
    ids[~shared] = prefixes.num_groups * num_shared + np.arange(np.count_nonzero(~shared))
    return BlockIds(prefixes.block_size, ids, offsets)


def _stream(seed: int, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64([seed, stream]))
