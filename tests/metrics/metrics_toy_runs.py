"""Lifelike run records from a toy scheduler, for the tests of metrics and for looking at the plots.

The toy is no policy of PagedServe and imports none: metrics must be right for any record.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from metrics_hand_records import MS, REQUEST_DEFAULTS, STEP_DEFAULTS, header, rows_table

from pagedserve.metrics.record import RunRecord


def toy_record(
    seed: int = 0, num_requests: int = 60, rate: float = 4.0, num_blocks: int = 400, **rules: Any
) -> RunRecord:
    """Poisson arrivals at ``rate`` a second, log-normal lengths; ``rules`` are fields of ``ToyRunState``."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1e9 / rate, num_requests)).astype(int)
    prompts = np.clip(rng.lognormal(5.5, 0.9, num_requests), 4, 1500).astype(int)
    outputs = np.clip(rng.lognormal(4.3, 0.8, num_requests), 1, 500).astype(int)
    requests = [
        ToyRequestState(i, int(arrivals[i]), int(prompts[i]), int(outputs[i])) for i in range(num_requests)
    ]
    toy = ToyRunState(requests, num_blocks, **rules)
    toy.run()
    emissions = [
        {"request": r.id, "first_step": first, "num_steps": count}
        for r in requests
        for first, count in r.runs
    ]
    calls = [{"kind": "add", "subject": r.id, "now_ns": r.arrival_ns} for r in requests]
    return RunRecord(
        header=header(limits={"num_blocks": num_blocks, "block_size": toy.block_size}),
        steps=rows_table("steps", toy.steps, STEP_DEFAULTS),
        requests=rows_table("requests", [r.row() for r in requests], REQUEST_DEFAULTS),
        emissions=rows_table("emissions", emissions),
        calls=rows_table("calls", calls),
    )


@dataclass(slots=True, eq=False)
class ToyRequestState:
    """A request of the toy: its facts, and how far it is."""

    id: int
    arrival_ns: int
    prompt: int
    output: int
    decoding: bool = False
    computed: int = 0
    emitted: int = 0
    blocks: int = 0
    first_schedule_ns: int | None = None
    finish_ns: int | None = None
    preemptions: int = 0
    runs: list[list[int]] = field(default_factory=list)
    last_emit: int = -1

    @property
    def known(self) -> int:
        return self.prompt + self.emitted

    def row(self) -> dict[str, Any]:
        return {
            "request": self.id,
            "due_ns": self.arrival_ns,
            "arrival_ns": self.arrival_ns,
            "num_prompt_tokens": self.prompt,
            "num_output_tokens": self.emitted,
            "first_schedule_ns": self.first_schedule_ns,
            "finish_ns": self.finish_ns,
            "num_preemptions": self.preemptions,
        }


@dataclass(slots=True, eq=False)
class ToyRunState:
    """First come first served with chunked prefill; when blocks run out the newest starts over."""

    requests: list[ToyRequestState]
    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 64
    budget: int = 512
    reserve: int | None = None  # slots reserved per request; None: pages on demand
    static: bool = False  # admit only when nothing is running
    base_ms: float = 8.0
    now: int = 0
    last_decode_step: int = -1
    running: list[ToyRequestState] = field(default_factory=list)
    waiting: list[ToyRequestState] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> None:
        todo = sorted(self.requests, key=lambda r: r.arrival_ns)
        while todo or self.waiting or self.running:
            while todo and todo[0].arrival_ns <= self.now:
                self.waiting.append(todo.pop(0))
            if self.waiting or self.running:
                self._step()
            else:
                self.now = todo[0].arrival_ns

    def _free(self) -> int:
        return self.num_blocks - sum(r.blocks for r in self.running)

    def _missing(self, request: ToyRequestState) -> int:
        slots = request.known if self.reserve is None else self.reserve
        return max(0, -(-slots // self.block_size) - request.blocks)

    def _step(self) -> None:
        num_preemptions = self._grow()
        decodes = [r for r in self.running if r.decoding]
        chunks = self._chunks(self.budget - len(decodes))
        num_prefill = sum(chunks.values())
        duration = int((self.base_ms + 0.02 * num_prefill + 0.05 * len(decodes)) * MS)
        used = self.num_blocks - self._free()
        held = sum(r.computed + (1 if r.decoding else chunks.get(r, 0)) for r in self.running)
        self.steps.append(
            {
                "step": len(self.steps),
                "schedule_ns": self.now,
                "launch_ns": self.now + MS // 10,
                "commit_ns": self.now + duration,
                "num_prefill_tokens": num_prefill,
                "num_decode_tokens": len(decodes),
                "num_running": len(self.running),
                "num_waiting": len(self.waiting),
                "num_blocks_used": used,
                "num_blocks_free": self.num_blocks - used,
                "num_wasted_slots": used * self.block_size - held,
                "num_preemptions": num_preemptions,
                "num_recomputed_tokens": sum(n for r, n in chunks.items() if r.preemptions),
            }
        )
        self._commit(chunks, decodes)
        self.now += duration + MS // 5

    def _grow(self) -> int:
        num_preemptions = 0
        for request in list(self.running):
            while request in self.running and self._missing(request) > self._free():
                victim = self.running.pop()
                victim.computed = victim.blocks = 0
                victim.decoding = False
                victim.preemptions += 1
                self.waiting.insert(0, victim)
                num_preemptions += 1
            if request in self.running:
                request.blocks += self._missing(request)
        return num_preemptions

    def _chunks(self, budget: int) -> dict[ToyRequestState, int]:
        chunks: dict[ToyRequestState, int] = {}
        admitted = [] if self.static and self.running else list(self.waiting)
        for request in [r for r in self.running if not r.decoding] + admitted:
            fits = self._missing(request) <= self._free() and len(self.running) < self.max_num_seqs
            if budget <= 0 or (request not in self.running and not fits):
                break
            if request not in self.running:
                self.waiting.remove(request)
                self.running.append(request)
                request.blocks += self._missing(request)
                request.first_schedule_ns = request.first_schedule_ns or self.now
            chunks[request] = min(budget, request.known - request.computed)
            budget -= chunks[request]
        return chunks

    def _commit(self, chunks: dict[ToyRequestState, int], decodes: list[ToyRequestState]) -> None:
        step = self.steps[-1]
        for request, num_tokens in [*chunks.items(), *((r, 1) for r in decodes)]:
            request.computed += num_tokens
            if request.computed < request.known:
                continue
            if request.decoding and request.last_emit >= self.last_decode_step:
                request.runs[-1][1] += 1
            else:
                request.runs.append([step["step"], 1])
            request.decoding = True
            request.emitted += 1
            request.last_emit = step["step"]
            if request.emitted == request.output:
                request.finish_ns = step["commit_ns"]
                request.blocks = 0
                self.running.remove(request)
        if decodes:
            self.last_decode_step = step["step"]
