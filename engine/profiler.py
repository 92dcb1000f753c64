"""Measures steps of the real runner over a grid, and the host's time between steps, into a `Profile`.

Points are repeated in rounds over the whole grid, in another order each round, so that a machine's slow
minutes fall on all of them alike. KV contents do not matter to time, so contexts are claimed, not computed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from pagedserve.engine.engine import Engine, Vocabulary
from pagedserve.engine.output_text import OutputTextState
from pagedserve.engine.params import SamplingParams
from pagedserve.engine.runner import ModelRunner
from pagedserve.engine.sequences import SequenceState
from pagedserve.engine.stops import TokenStops
from pagedserve.metrics.profile import HostPoint, Profile, StepPoint
from pagedserve.policy import Limits, PrefillChunk, Request, StepPlan, StepShape, policy

GREEDY = SamplingParams(temperature=0.0, max_tokens=1 << 20, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Grid:
    """What is measured. Chunks: lengths times contexts. Decodes: batch sizes times contexts, each also skewed.

    A skewed batch has the same total context, half of it in one sequence. Mixed steps combine each of
    ``mixed_chunks`` with each decode batch at the middle context.
    """

    chunk_tokens: tuple[int, ...] = (1, 16, 64, 128, 256, 512)
    chunk_contexts: tuple[int, ...] = (0, 512, 2048)
    decode_batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    decode_contexts: tuple[int, ...] = (16, 256, 1024, 2048)
    mixed_chunks: tuple[int, ...] = (64, 256)
    host_rows: tuple[int, ...] = (1, 8, 32)

    def shapes(self, limits: Limits) -> list[tuple[str, list[int], list[tuple[int, int]]]]:
        """(kind, decode contexts, chunks) of every point that fits the limits."""
        points: list[tuple[str, list[int], list[tuple[int, int]]]] = []
        for tokens in self.chunk_tokens:
            points += [("chunk", [], [(tokens, context)]) for context in self.chunk_contexts]
        for batch in self.decode_batches:
            for context in self.decode_contexts:
                points.append(("decode", [context] * batch, []))
                if batch > 2:
                    points.append(("decode", skewed(batch, context), []))
            middle = self.decode_contexts[len(self.decode_contexts) // 2]
            points += [("mixed", [middle] * batch, [(tokens, 0)]) for tokens in self.mixed_chunks]
        return [point for point in points if _fits(point[1], point[2], limits)]


def skewed(batch: int, context: int) -> list[int]:
    """Contexts of the same sum, half of it in one sequence."""
    total = batch * context
    rest = [max(1, (total - total // 2) // (batch - 1))] * (batch - 1)
    return [*rest, total - sum(rest)]


def _fits(decodes: Sequence[int], chunks: Sequence[tuple[int, int]], limits: Limits) -> bool:
    longest = max([*(context + 1 for context in decodes), *(tokens + context for tokens, context in chunks)])
    blocks = sum(-(-(context + 1) // limits.block_size) for context in decodes)
    blocks += sum(-(-(tokens + context) // limits.block_size) for tokens, context in chunks)
    rows = len(decodes) + len(chunks)
    tokens = len(decodes) + sum(chunk[0] for chunk in chunks)
    return (
        longest < limits.max_model_len
        and blocks <= limits.num_blocks
        and rows <= limits.max_num_seqs
        and tokens <= limits.max_num_batched_tokens
    )


class StepBench:
    """Runs single steps of given shapes on a runner of its own, made of requests that live for one step."""

    def __init__(self, runner: ModelRunner, vocabulary: Vocabulary, limits: Limits) -> None:
        self._runner = runner
        self._vocabulary = vocabulary
        self._limits = limits
        self._num_requests = self._num_steps = 0
        self._departed: tuple[int, ...] = ()

    def measure(self, decodes: Sequence[int], chunks: Sequence[tuple[int, int]]) -> tuple[StepShape, int]:
        """Launch and wait for one step; return its shape and the ns from launch to the end of the wait."""
        plan = self._plan(decodes, chunks)
        self._runner.launch(plan)
        start = time.perf_counter_ns()
        self._runner.wait()
        return plan.shape, time.perf_counter_ns() - start

    def _plan(self, decodes: Sequence[int], chunks: Sequence[tuple[int, int]]) -> StepPlan:
        size, next_block = self._limits.block_size, 0
        requests: list[Request] = []
        blocks: list[tuple[int, tuple[int, ...]]] = []
        for tokens in [*(n + c for n, c in chunks), *(context + 1 for context in decodes)]:
            request = Request(self._num_requests, 0, tokens, GREEDY.max_tokens)
            self._num_requests += 1
            count = -(-tokens // size)
            requests.append(request)
            blocks.append((request.id, tuple(range(next_block, next_block + count))))
            next_block += count
            self._expect(request)
        ids = tuple(request.id for request in requests)
        shape = StepShape(
            tuple(chunks),
            len(decodes),
            sum(decodes),
            max(decodes, default=0),
            sum(context * context for context in decodes),
            len(decodes) + len(chunks),
        )
        plan = StepPlan(
            self._num_steps,
            tuple(requests),
            tuple(PrefillChunk(i, c, n, True) for i, (n, c) in zip(ids, chunks, strict=False)),
            ids[len(chunks) :],
            departed=self._departed,
            new_blocks=tuple(blocks),
            shape=shape,
        )
        self._num_steps += 1
        self._departed = ids
        return plan

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

    The engine must be idle. Its KV cache is used for the measurement, its requests are not.
    """
    if engine.has_work:
        raise ValueError(f"the engine has {engine.num_live} live requests; profile an idle engine")
    grid = grid or Grid()
    limits, runner = engine.limits, engine.runner
    bench = StepBench(
        ModelRunner(runner.model, limits, engine.vocabulary.size, False, False, kv=runner.kv),
        engine.vocabulary,
        limits,
    )
    points = grid.shapes(limits)
    order = random.Random(seed)
    times: list[list[int]] = [[] for _ in points]
    shapes: list[StepShape | None] = [None] * len(points)
    total = len(points) * (num_repeats + 1)
    for round_number in range(num_repeats + 1):
        for index in order.sample(range(len(points)), len(points)):
            shapes[index], spent = bench.measure(points[index][1], points[index][2])
            # The first round warms up allocators and kernels.
            if round_number:
                times[index].append(spent)
            if progress is not None:
                progress(sum(map(len, times)) + min(round_number, 1) * len(points), total)
    steps = tuple(
        StepPoint(kind, shape, *quantiles(spent), num_repeats)
        for (kind, _, _), shape, spent in zip(points, shapes, times, strict=True)
        if shape is not None
    )
    host = tuple(_host_point(engine, rows) for rows in grid.host_rows if rows <= limits.max_num_seqs)
    return Profile(_provenance(engine, model_name), steps, host)


def _host_point(engine: Engine, num_rows: int, num_steps: int = 40) -> HostPoint:
    """Decode with ``num_rows`` requests on a fresh engine and read the gaps between steps off its record."""
    fresh = Engine(
        engine.runner.model, engine.vocabulary, policy("mixed"), engine.limits, kv=engine.runner.kv
    )
    params = SamplingParams(temperature=0.0, max_tokens=num_steps, ignore_eos=True)
    for row in range(num_rows):
        fresh.submit([row % engine.vocabulary.size] * 8, params)
    while fresh.has_work:
        fresh.step()
    record = fresh.record()
    launch, commit = record.array("steps", "launch_ns"), record.array("steps", "commit_ns")
    gaps = (launch[2:] - commit[1:-1]).tolist()
    return HostPoint(num_rows, *quantiles(gaps), len(gaps))


def quantiles(values: Sequence[int]) -> tuple[int, int, int]:
    """p20, p50 and p80, rounded to integers."""
    low, middle, high = np.percentile(np.array(values), [20, 50, 80])
    return round(low), round(middle), round(high)


def _provenance(engine: Engine, model_name: str) -> dict[str, Any]:
    model = engine.runner.model
    config = {k: v for k, v in asdict(model.config).items() if isinstance(v, int | float | str | bool)}
    return {
        "model": model_name,
        "geometry": config,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": model.attention.name,
        "num_threads": torch.get_num_threads(),
        "limits": asdict(engine.limits),
        "versions": {"torch": version("torch"), "pagedserve": version("pagedserve")},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
