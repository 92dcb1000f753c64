"""The profile grid, and live replays of a short synthetic trace at shares of the measured capacity, as records.

Capacity is what a live run serves when all requests are there at once; it also finds kernels compiled. What comes
of it (profile, records, traces) is compared with the simulator by `gpu_report`, anywhere.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from gpu_engines import Bench, make_bench
from gpu_part import Part
from gpu_timing import compiles

from pagedserve.engine.profile_grid import Grid
from pagedserve.engine.profiler import profile_engine
from pagedserve.metrics.record import RunRecord
from pagedserve.traces.lengths import Uniform
from pagedserve.traces.native import write_trace
from pagedserve.traces.synthesis import synthesize
from pagedserve.traces.trace import Trace
from pagedserve.traces.transforms import first, with_rate
from pagedserve.validation.live import replay
from pagedserve.validation.prompts import TracePrompts

GRID = Grid(
    chunk_tokens=(1, 16, 64, 256, 1024, 2048, 4096, 8192),
    chunk_contexts=(0, 1024),
    decode_batches=(1, 4, 16, 64, 128, 256),
    decode_contexts=(16, 512, 1024, 2048),
    mixed_chunks=(256, 1024, 4096),
    split_chunks=(4, 16),
    host_rows=(1, 16, 64, 256),
)
SHORT_GRID = Grid((1, 64, 256, 1024, 4096), (0, 1024), (1, 16, 64, 256), (16, 1024), (1024,), (4,), (1, 64))
TINY_GRID = Grid((1, 24), (0, 16), (1, 3), (8, 40), (8,), (2,), (2,))
FULL_GRID_S = 60.0
NUM_REPEATS = 3
LOADS = ((0.5, 0), (0.85, 0), (1.0, 0), (0.85, 1))
"""Share of the capacity, and overlap depth."""
SLACK_S = 4.0


def run(part: Part) -> None:
    """Profile first, since nothing can be foretold without one."""
    bench = make_bench(part, "tiny" if part.is_tiny else "qwen3-0.6b")
    with part.findings.trying("the profile"):
        _profile(part, bench)
    with part.findings.trying("the replays"):
        _replays(part, bench)


def _profile(part: Part, bench: Bench) -> None:
    grid = TINY_GRID if part.is_tiny else GRID
    if not part.is_tiny and part.left_s < FULL_GRID_S + 30:
        part.findings.say(f"a shorter grid is measured: {part.left_s:.0f} s are left for profile and replays")
        grid = SHORT_GRID
    repeats = 1 if part.is_tiny else NUM_REPEATS
    start = time.monotonic()
    with bench.engine(0, True, record=True) as engine:
        profile = profile_engine(engine, f"{bench.name}, random weights", grid, num_repeats=repeats)
    profile.save(part.folder / "profile.json")
    part.findings.facts["profile"] = {
        "num_points": len(profile.steps),
        "num_host_points": len(profile.host),
        "num_repeats": repeats,
        "seconds": time.monotonic() - start,
        "sha256": profile.sha256(),
    }
    part.findings.save()


def traffic(is_tiny: bool) -> Trace:
    """Poisson arrivals at one a second; `with_rate` makes it the rate wanted."""
    if is_tiny:
        return synthesize(4, 1.0, prompt=Uniform(4, 20), output=Uniform(2, 4), rescale=True, name="tiny")
    prompt, output = Uniform(100, 1024), Uniform(16, 384)
    return synthesize(256, 1.0, prompt=prompt, output=output, rescale=True, name="synthetic")


def _replays(part: Part, bench: Bench) -> None:
    trace = traffic(part.is_tiny)
    if not part.is_tiny:
        _run(part, bench, at_once(trace), "warm-up", 0)
    flood, took_s = _run(part, bench, at_once(trace), "at-once", 0)
    _save(part, flood, at_once(trace), "at-once")
    capacity = len(trace) / took_s
    part.findings.facts["capacity_requests_per_s"] = capacity
    for load, depth in LOADS:
        label = f"load-{round(100 * load)}-depth-{depth}"
        needed_s = took_s / load + took_s + SLACK_S
        cut = trace
        if part.left_s < needed_s and not part.is_tiny:
            fitting = int(len(trace) * (part.left_s - SLACK_S) / (needed_s - SLACK_S))
            if fitting < 48:
                part.has_time(needed_s, label)
                continue
            cut = first(trace, fitting)
            part.findings.say(f"{label}: {fitting} of {len(trace)} requests, for want of time")
        sent = with_rate(cut, load * capacity)
        with part.findings.trying(label), compiles() as compiled:
            record, seconds = _run(part, bench, sent, label, depth)
            _save(part, record, sent, label)
            row = {"label": label, "load": load, "overlap_depth": depth, "num_requests": len(sent)}
            row |= {"rate_per_s": load * capacity, "served_in_s": seconds}
            part.findings.add("replays", row | {"compiled": compiled.num, "compile_s": compiled.seconds})


def at_once(trace: Trace) -> Trace:
    """The same requests, all at time 0."""
    zeros = np.zeros(len(trace), dtype=np.int64)
    return Trace.of(trace.name, zeros, trace.num_prompt_tokens, trace.num_output_tokens)


def _run(part: Part, bench: Bench, trace: Trace, label: str, depth: int) -> tuple[RunRecord, float]:
    """The record, and seconds from the first arrival to the last token."""
    with bench.engine(depth, True, record=True) as engine:
        record = replay(engine, trace, TracePrompts(trace, bench.vocabulary.size, seed=0))
    reasons = set(record.requests.column("finish_reason").to_pylist())
    made = int(record.array("requests", "num_output_tokens").sum())
    if reasons - {"stop", "length"} or made != int(trace.num_output_tokens.sum()):
        part.findings.fail(f"{label}: ends {sorted(reasons)}, {made} output tokens")
    begun = int(record.array("requests", "arrival_ns").min())
    return record, (int(record.array("steps", "commit_ns")[-1]) - begun) / 1e9


def _save(part: Part, record: RunRecord, trace: Trace, label: str) -> None:
    folder: Path = part.folder / "records" / label
    record.save(folder)
    write_trace(trace, folder.with_suffix(".trace.csv"))
