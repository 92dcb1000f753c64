"""The offline workload of nano-vllm: 256 sequences, prompts and outputs uniform from 100 to 1024 tokens, seed 0.

The lengths and prompt tokens are those of its `bench.py` (133,966 output tokens), drawn in the same order; sampling
is greedy here, and EOS is ignored there and here. ``wall_s`` counts from the first request handed in, as there;
``step_s`` from the first step to the end of the last. ``device_s`` is the time between two CUDA events around
forward and sampling, summed over the steps: with graphs about what the device computes; without, the gaps in which
it waits for launches are inside.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from gpu_engines import Bench, make_bench
from gpu_part import Part
from gpu_timing import compiles

from pagedserve.engine.engine import Engine
from pagedserve.engine.params import SamplingParams
from pagedserve.engine.runner import ModelRunner, StepResult

FULL = (256, 100, 1024, 10_000)
TINY = (3, 2, 5, 255)
"""Sequences, shortest and longest, and the largest id of a prompt."""
VARIANTS = ((True, 1), (True, 0), (False, 0), (False, 1))
"""Graphs or not, and the overlap depth."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """Prompts, and how many tokens each output is to have."""

    prompts: list[list[int]]
    lengths: list[int]

    def short(self) -> Sequences:
        """A few tokens each, so that batches of every power of two occur: what they need is then compiled."""
        num = len(self.prompts)
        return Sequences(self.prompts, [2 * (num // (index + 1)).bit_length() for index in range(num)])


def sequences(num: int, shortest: int, longest: int, largest_id: int) -> Sequences:
    """Prompts and output lengths, in the order of draws of nano-vllm's benchmark."""
    draw = random.Random(0)
    prompts = [
        [draw.randint(0, largest_id) for _ in range(draw.randint(shortest, longest))] for _ in range(num)
    ]
    return Sequences(prompts, [draw.randint(shortest, longest) for _ in range(num)])


@dataclass(slots=True)
class DeviceClockState:
    """Times every step of a runner on its device, from before forward to after sampling."""

    is_cuda: bool
    pairs: list[tuple[Any, Any]] = field(default_factory=list)

    def watch(self, runner: ModelRunner) -> None:
        """From now on."""
        compute = runner._compute

        def timed(*given: Any) -> StepResult:
            first = self._mark()
            result = compute(*given)
            self.pairs.append((first, self._mark()))
            return result

        runner._compute = timed  # pyright: ignore[reportAttributeAccessIssue]

    def _mark(self) -> Any:
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def total_s(self) -> float:
        """Of all steps; waits for the device."""
        if not self.is_cuda:
            return sum(last - first for first, last in self.pairs)
        torch.cuda.synchronize()
        return sum(first.elapsed_time(last) for first, last in self.pairs) / 1e3


def offline(part: Part, bench: Bench, work: Sequences, *, has_graphs: bool, depth: int) -> dict[str, Any]:
    """One run of all sequences, as a row. It ends early where time runs out."""
    lengths, clock = work.lengths, DeviceClockState(part.device != "cpu")
    with compiles() as compiled, bench.engine(depth, has_graphs, record=False) as engine:
        clock.watch(engine.runner)
        start = time.perf_counter()
        states = []
        for prompt, length in zip(work.prompts, lengths, strict=True):
            params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
            states += engine.submit(prompt, params)
        begun = time.perf_counter()
        is_whole = _finish(part, engine)
        ended = time.perf_counter()
        device_s = clock.total_s()
    num_tokens = sum(state.sequence.num_output_tokens for state in states)
    if is_whole and num_tokens != sum(lengths):
        part.findings.fail(f"{num_tokens} output tokens were made, and {sum(lengths)} asked for")
    return {
        "model": bench.name,
        "graphs": has_graphs,
        "overlap_depth": depth,
        "whole": is_whole,
        "output_tokens": num_tokens,
        "prompt_tokens": sum(map(len, work.prompts)),
        "wall_s": ended - start,
        "output_tokens_per_s": num_tokens / (ended - start),
        "num_steps": len(clock.pairs),
        "step_s": ended - begun,
        "device_s": device_s,
        "whole_step_over_device": (ended - begun) / device_s,
        "compiled": compiled.num,
        "compile_s": compiled.seconds,
    }


def _finish(part: Part, engine: Engine[ModelRunner]) -> bool:
    """Step until nothing is left; False if the part's time ended first, and the rest was aborted."""
    while engine.has_work:
        if part.left_s < 1.0:
            engine.abort_all()
            while engine.is_ready:
                engine.step()
            return False
        engine.step()
    return True


def run(part: Part, name: str | None = None, variants: tuple[tuple[bool, int], ...] = VARIANTS) -> None:
    """Each variant in turn, behind a short run that finds kernels compiled; those without time are left out."""
    bench = make_bench(part, name or ("tiny" if part.is_tiny else "qwen3-0.6b"))
    work = sequences(*(TINY if part.is_tiny else FULL))
    needed_s = 0.0
    for has_graphs, depth in variants:
        kind = "with graphs" if has_graphs else "without graphs"
        label = f"{bench.name}, {kind}, overlap depth {depth}"
        if not part.has_time(needed_s, label):
            continue
        with part.findings.trying(label):
            warm_up = offline(part, bench, work.short(), has_graphs=has_graphs, depth=depth)
            row = offline(part, bench, work, has_graphs=has_graphs, depth=depth)
            part.findings.add("workload", row | {"warm_up_s": warm_up["wall_s"]})
            if not row["whole"]:
                part.findings.say(f"{label}: time ran out; the rates are of what was done")
            needed_s = row["wall_s"] * (1.0 if has_graphs else 1.5)


def run_large(part: Part) -> None:
    """The larger model, with graphs."""
    run(part, "tiny" if part.is_tiny else "llama-3.1-8b", VARIANTS[:1] if part.is_tiny else VARIANTS[:2])
