"""Measures steps of the real runner over a grid, and the host's time between steps, into a `Profile`.

Points are repeated in rounds over everything there is to measure, in another order each round, so that a
machine's slow minutes fall on all of them alike. KV contents do not matter to time, so contexts are claimed,
not computed.
"""

from __future__ import annotations

import os
import platform
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

import pagedserve
from pagedserve.engine.engine import Engine
from pagedserve.engine.intake import Vocabulary
from pagedserve.engine.output_text import OutputTextState
from pagedserve.engine.params import SamplingParams
from pagedserve.engine.profile_grid import GRIDS, HOST_PROMPT, HOST_STEPS, Grid, Point
from pagedserve.engine.runner import ModelRunner
from pagedserve.engine.sequences import SequenceState
from pagedserve.engine.stops import TokenStops
from pagedserve.engine.swap_bench import SwapBench
from pagedserve.metrics.profile import HostPoint, Profile, StepPoint, SwapPoint
from pagedserve.policy import Limits, PrefillChunk, Request, StepPlan, policy

Measure = Callable[[], list[int]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=1 << 20, ignore_eos=True)


class StepBench:
    """Runs single steps of given shapes on a runner of its own, made of requests that live for one step."""

    def __init__(self, runner: ModelRunner, vocabulary: Vocabulary, limits: Limits) -> None:
        self._runner = runner
        self._vocabulary = vocabulary
        self._limits = limits
        self._num_requests = self._num_steps = 0
        self._departed: tuple[int, ...] = ()
        self._left: tuple[int, ...] = ()

    def measure(self, point: Point) -> int:
        """Launch and wait for one step; return the ns from launch to the end of the wait.

        Both ends are where the engine's loop stamps ``launch_ns`` and ``commit_ns``.
        """
        self._runner.launch(self._plan(point))
        start = time.perf_counter_ns()
        self._runner.wait()
        return time.perf_counter_ns() - start

    def _plan(self, point: Point) -> StepPlan:
        chunks, decodes = point.chunks, point.decodes
        requests, blocks = self._requests([*(n + c for n, c in chunks), *(c + 1 for c in decodes)])
        ids = tuple(request.id for request in requests)
        rows = ids[len(chunks) :]
        plan = StepPlan(
            self._num_steps,
            requests,
            tuple(PrefillChunk(i, c, n, point.chunks_sample) for i, (n, c) in zip(ids, chunks, strict=False)),
            rows,
            joined=rows,
            left=self._left,
            departed=self._departed,
            new_blocks=blocks,
            shape=point.shape,
        )
        self._num_steps += 1
        self._departed, self._left = ids, rows
        return plan

    def _requests(
        self, num_known: Sequence[int]
    ) -> tuple[tuple[Request, ...], tuple[tuple[int, tuple[int, ...]], ...]]:
        """A request for each number of known tokens, expected by the runner, and blocks for all of them."""
        requests: list[Request] = []
        blocks: list[tuple[int, tuple[int, ...]]] = []
        next_block = 0
        for tokens in num_known:
            request = Request(self._num_requests, 0, tokens, GREEDY.max_tokens)
            self._num_requests += 1
            count = -(-tokens // self._limits.block_size)
            requests.append(request)
            blocks.append((request.id, tuple(range(next_block, next_block + count))))
            next_block += count
            self._expect(request)
        return tuple(requests), tuple(blocks)

    def _expect(self, request: Request) -> None:
        tokens = (np.arange(request.num_prompt_tokens) * 7919 % self._vocabulary.size).tolist()
        stops = TokenStops.for_request(GREEDY, self._vocabulary.eos_token_ids)
        text = OutputTextState(GREEDY, self._vocabulary.pieces)
        self._runner.expect(SequenceState(request, GREEDY, tokens, stops, text, seed=0))


def profile_engine(
    engine: Engine,
    model_name: str,
    grid: Grid | None = None,
    *,
    num_repeats: int = 5,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Measure a grid on an engine's model and limits; ``progress(done, total)`` is called after each step.

    The engine must be idle; its KV cache is used for the measurement. What does not fit its limits is left
    out. ValueError if nothing fits (`Grid.fitting`), if the engine is busy or has several ranks.
    """
    if engine.has_work:
        raise ValueError(f"the engine has {engine.num_live} live requests; profile an idle engine")
    if engine.runner.model.ranks.size > 1:
        raise ValueError(
            f"tensor_parallel_size is {engine.runner.model.ranks.size}; a profile is measured on one rank: leave it "
            "out"
        )
    if num_repeats < 1:
        raise ValueError(f"num_repeats is {num_repeats}; it must be at least 1")
    grid, limits, runner = grid or GRIDS["standard"], engine.limits, engine.runner
    points, rows = grid.fitting(limits)
    own = ModelRunner(runner.model, limits, engine.vocabulary.size, False, False, kv=runner.kv)
    own.graphs = runner.graphs
    bench = StepBench(own, engine.vocabulary, limits)
    measures: list[Measure] = [lambda point=point: [bench.measure(point)] for point in points]
    measures += [lambda n=n: _host_gaps(engine, n) for n in rows]
    swaps = SwapBench(runner.kv, grid.swap_blocks)
    measures += [lambda case=case: [swaps.measure(*case)] for case in swaps.cases]
    times = _interleaved(measures, num_repeats, seed, progress)
    provenance = {
        "model": model_name,
        **provenance_of(engine),
        "grid": {name: list(values) for name, values in asdict(grid).items()},
        "num_repeats": num_repeats,
        "seed": seed,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    left = iter(times)
    return Profile(
        provenance,
        tuple(StepPoint(p.kind, p.shape, *_told(spent)) for p, spent in zip(points, left, strict=False)),
        tuple(HostPoint(n, *_told(gaps)) for n, gaps in zip(rows, left, strict=False)),
        tuple(SwapPoint(*case, *_told(spent)) for case, spent in zip(swaps.cases, left, strict=True)),
    )


def _told(spent: Sequence[int]) -> tuple[int, int, int, int]:
    """The quantiles of a measurement's times, and how many there are."""
    return *quantiles(spent), len(spent)


def _interleaved(
    measures: Sequence[Measure],
    num_repeats: int,
    seed: int,
    progress: Callable[[int, int], None] | None,
) -> list[list[int]]:
    """What each measurement gave in all rounds but the first, which warms up allocators and kernels."""
    times: list[list[int]] = [[] for _ in measures]
    order, total, done = random.Random(seed), len(measures) * (num_repeats + 1), 0
    for round_number in range(num_repeats + 1):
        for index in order.sample(range(len(measures)), len(measures)):
            found = measures[index]()
            if round_number:
                times[index] += found
            done += 1
            if progress is not None:
                progress(done, total)
    return times


def _host_gaps(engine: Engine, num_rows: int) -> list[int]:
    """Decode with ``num_rows`` requests on a fresh engine; the gaps between its decode steps, in ns."""
    spec = policy("mixed", watermark=0.0)
    fresh = Engine(engine.runner.model, engine.vocabulary, spec, engine.limits, kv=engine.runner.kv)
    fresh.runner.graphs = engine.runner.graphs
    params = SamplingParams(temperature=0.0, max_tokens=HOST_STEPS, ignore_eos=True)
    for row in range(num_rows):
        fresh.submit([row % engine.vocabulary.size] * HOST_PROMPT, params)
    while fresh.has_work:
        fresh.step()
    record = fresh.record()
    launch, commit = record.array("steps", "launch_ns"), record.array("steps", "commit_ns")
    return (launch[2:] - commit[1:-1]).tolist()


def quantiles(values: Sequence[int]) -> tuple[int, int, int]:
    """p20, p50 and p80, rounded to integers."""
    low, middle, high = np.percentile(np.array(values), [20, 50, 80])
    return round(low), round(middle), round(high)


def device_name(device: torch.device | str) -> str:
    """What the device calls itself."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def provenance_of(engine: Engine) -> dict[str, Any]:
    """What a profile of this engine says of the model, the device and the software, as JSON values."""
    model = engine.runner.model
    config = {k: v for k, v in asdict(model.config).items() if isinstance(v, int | float | str | bool)}
    return {
        "geometry": config,
        "device": str(model.device),
        "device_name": device_name(model.device),
        "num_cpus": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": model.attention.name,
        "kv_cache_dtype": "fp8" if model.has_byte_cache else "auto",
        "tensor_parallel_size": model.ranks.size,
        "has_graphs": engine.runner.graphs is not None,
        "limits": asdict(engine.limits),
        "versions": {
            "pagedserve": pagedserve.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
