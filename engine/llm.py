"""`LLM`: a model in a variable, for scripts and notebooks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any

from pagedserve.engine.detokenize import TokenPieces
from pagedserve.engine.engine import Engine
from pagedserve.engine.graphs import make_graphs
from pagedserve.engine.host_memory import HostMemory
from pagedserve.engine.intake import Vocabulary
from pagedserve.engine.interrupts import InterruptsState
from pagedserve.engine.kv_calibration import calibrate, check_asked
from pagedserve.engine.kv_memory import block_bytes_of, plan_num_blocks
from pagedserve.engine.model.config import ModelConfig
from pagedserve.engine.model.files import ModelFiles
from pagedserve.engine.model.load import LoadedModel, load_model
from pagedserve.engine.model.tokenizer import eos_token_ids, load_tokenizer
from pagedserve.engine.outputs import Completion, CompletionState
from pagedserve.engine.params import SamplingParams
from pagedserve.engine.runner import ModelRunner
from pagedserve.engine.swapping import planned_cpu_blocks
from pagedserve.metrics.record import RunRecord
from pagedserve.policy import IllegalPlan, Limits, Policy
from pagedserve.policy import policy as policy_preset

DEFAULT_MAX_MODEL_LEN = 4096


class _Stuck(IllegalPlan):
    """Nothing runs and nothing will."""


class LLM:
    """Loads a model and generates with any policy.

    ``model``: a directory of safetensors, a GGUF file, a hub repository, or the alias ``smollm2-135m``.
    ``policy``: a preset's name or a `Policy`, also one written in a notebook cell. ``num_blocks`` None: on a CPU
    what all sequences could use, at most 1 GiB and a third of the memory that is free; on a GPU what weights and
    a step leave of ``gpu_memory_utilization``, its share that is taken (0.9). ``num_cpu_blocks``: KV blocks in host
    memory for a policy that swaps, or ``swap_space`` in GiB on each rank. ``tensor_parallel_size``: processes
    that share the model, each on a GPU of its own, or all on the CPU. ``calculate_kv_scales``: measure the scales of
    a cache in fp8 that the checkpoint lacks (`kv_calibration`), which are 1 otherwise. ``enforce_eager``: no CUDA
    graphs. ``record`` False keeps no record, which otherwise grows with every step. ``decisions`` says in words what
    was chosen for you.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel,
        *,
        policy: str | Policy = "vllm_v1",
        dtype: str = "auto",
        device: str = "cpu",
        attention: str = "auto",
        kv_cache_dtype: str = "auto",
        calculate_kv_scales: bool = False,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        block_size: int = 16,
        num_blocks: int | None = None,
        max_num_queued_reqs: int | None = None,
        num_cpu_blocks: int | None = None,
        swap_space: float | None = None,
        overlap_depth: int = 0,
        seed: int | None = None,
        progress: bool = True,
        record: bool = True,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float | None = None,
        enforce_eager: bool = False,
    ) -> None:
        spec = policy if isinstance(policy, Policy) else policy_preset(policy)
        host = HostMemory(num_cpu_blocks, swap_space)
        host.check(spec)
        if calculate_kv_scales and not isinstance(model, LoadedModel):
            check_asked(kv_cache_dtype == "fp8")
        how: dict[str, Any] = {"dtype": dtype, "device": device, "attention": attention}
        how |= {"kv_cache_dtype": kv_cache_dtype, "max_model_len": max_model_len}
        loaded = _loaded(model, tensor_parallel_size, progress, **how)
        with ExitStack() as undo:
            if not isinstance(model, LoadedModel):
                undo.callback(
                    loaded.model.ranks.close
                )  # or its processes would outlive a mistake found below
            self.model = loaded.model
            self.tokenizer = load_tokenizer(loaded.files)
            if max_model_len is None:
                max_model_len = min(self.model.max_model_len, DEFAULT_MAX_MODEL_LEN)
            limits = Limits(
                max_num_batched_tokens=max_num_batched_tokens,
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
                block_size=block_size,
                max_num_queued_reqs=max_num_queued_reqs,
            )
            vocabulary = vocabulary_of(loaded, self.tokenizer)
            if calculate_kv_scales:
                calibrate(self.model, vocabulary.encode, vocabulary.size, max_model_len)
            num_host_blocks = host.num_blocks(block_bytes_of(self.model, block_size))
            sizes = (num_blocks, gpu_memory_utilization, num_host_blocks)
            num_blocks, why = plan_num_blocks(self.model, limits, *sizes, has_graphs=not enforce_eager)
            limits = replace(limits, num_blocks=num_blocks)
            limits = replace(limits, num_cpu_blocks=planned_cpu_blocks(self.model, limits, host))
            how_run: dict[str, Any] = {"overlap_depth": overlap_depth, "seed": seed, "record": record}
            self.engine = Engine(self.model, vocabulary, spec, limits, **how_run)
            graphs = _record_graphs(self.engine, enforce_eager, progress)
            self.decisions = (*_decisions(loaded, self.engine, why), *graphs)
            undo.pop_all()

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[list[Completion]]:
        """Generate for all prompts; for each prompt its ``n`` completions, in the order given.

        A prompt is text or token ids. One ``params`` serves all prompts, or give one for each.
        """
        many = as_prompts(prompts)
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(many)
        else:
            each = list(params)
        if len(each) != len(many):
            raise ValueError(
                f"{len(each)} sampling params for {len(many)} prompts; give one, or one for each"
            )
        groups: list[list[CompletionState]] = []
        try:
            for prompt, own in zip(many, each, strict=True):
                groups.append(self.engine.submit(prompt, own))
        except BaseException:
            # What was handed in must not run in the next call.
            self.engine.abort_all()
            while self.engine.is_ready:
                self.engine.step()
            raise
        with progress_bar(sum(len(group) for group in groups)) if progress else nullcontext() as advance:
            self.finish_all(None if advance is None else lambda: advance(self.engine.num_live))
        return [[state.completion() for state in group] for group in groups]

    def finish_all(self, after_step: Callable[[], None] | None = None) -> None:
        """Step until every request has ended, calling ``after_step`` after each step.

        Ctrl-C takes effect between two steps and aborts what runs. Raises IllegalPlan if the policy leaves
        requests waiting for ever. The engine can be used again after both.
        """
        engine, interrupts = self.engine, InterruptsState()
        try:
            with interrupts.holding():
                while engine.has_work:
                    with interrupts.step():
                        moved = engine.step()
                    if not moved and engine.has_work:
                        self._sleep()
                    if after_step is not None:
                        after_step()
        except (KeyboardInterrupt, _Stuck):
            engine.abort_all()
            while engine.is_ready:
                engine.step()
            raise

    def _sleep(self) -> None:
        """Nothing can be scheduled now: wait for the time that the policy named."""
        count = self.engine.num_stranded
        if count:
            raise _Stuck(
                f"the policy schedules nothing while {count} requests wait and nothing runs: they would wait for ever"
            )
        time.sleep(self.engine.seconds_to_wake or 0)

    def record(self, trace: dict[str, Any] | None = None) -> RunRecord:
        """The record of everything generated so far."""
        return self.engine.record(trace)

    def close(self) -> None:
        """Stop the device thread and the model's other ranks, if there are any; see `Engine.close`."""
        self.engine.close()
        self.model.ranks.close()


def _loaded(
    model: str | Path | LoadedModel, tensor_parallel_size: int, progress: bool, **how: Any
) -> LoadedModel:
    """The model, loaded here, or as it was handed in. ValueError for options that come too late."""
    if isinstance(model, LoadedModel):
        asked = (how["dtype"], how["device"], how["attention"], how["kv_cache_dtype"], tensor_parallel_size)
        if asked != ("auto", "cpu", "auto", "auto", 1):
            raise ValueError("the model is loaded already; give dtype, device and attention to load_model")
        return model
    if tensor_parallel_size == 1:
        return load_model(model, **how, progress=progress)
    from pagedserve.engine.parallel.processes import load_sharded

    return load_sharded(model, tensor_parallel_size, **how, progress=progress)


def _record_graphs(engine: Engine[ModelRunner], enforce_eager: bool, progress: bool) -> tuple[str, ...]:
    """Record decode steps where the device can; what was done, in words. ValueError if it could not anyway."""
    runner, limits = engine.runner, engine.limits
    graphs = make_graphs(runner.model, runner.kv, limits.max_num_seqs, limits.max_model_len)
    if enforce_eager and graphs is None:
        raise ValueError("enforce_eager is true, and there would be no CUDA graphs here anyway: leave it out")
    if enforce_eager or graphs is None:
        return ()
    with progress_bar(len(graphs.sizes), "recording graphs") if progress else nullcontext() as advance:
        left = len(graphs.sizes)
        for _ in graphs.record():
            left -= 1
            if advance is not None:
                advance(left)
    runner.graphs = graphs
    return (f"CUDA graphs for decode batches of up to {graphs.sizes[-1]}",)


def as_prompts(prompts: Any) -> list[str | list[int]]:
    """One prompt or many, each text or ids, as a list of prompts. ValueError names what is neither."""
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if items and all(isinstance(item, Integral) for item in items):
        return [[int(item) for item in items]]
    return [item if isinstance(item, str) else _as_ids(item, index) for index, item in enumerate(items)]


def _as_ids(item: Any, index: int) -> list[int]:
    tokens = list(item) if isinstance(item, Iterable) else None
    if tokens is None or not all(isinstance(token, Integral) for token in tokens):
        raise ValueError(f"prompts[{index}] is neither text nor a list of token ids: {item!r}")
    return [int(token) for token in tokens]


def vocabulary_of(loaded: LoadedModel, tokenizer: Any) -> Vocabulary:
    """The vocabulary of a loaded model."""
    return make_vocabulary(loaded.model.config, loaded.files, tokenizer)


def make_vocabulary(config: ModelConfig, files: ModelFiles, tokenizer: Any) -> Vocabulary:
    """The tokenizer's ids, and no padded rows of the model."""
    size = min(config.vocab_size, len(tokenizer))
    return Vocabulary(
        size=size,
        # A config may name ids that the tokenizer lacks; they are never sampled.
        eos_token_ids=frozenset(i for i in eos_token_ids(files, tokenizer) if 0 <= i < size),
        pieces=TokenPieces.of(tokenizer),
        encode=lambda text: tokenizer.encode(text),
    )


@contextmanager
def progress_bar(count: int, words: str = "generating") -> Iterator[Callable[[int], None]]:
    """A bar on the screen; call what it gives with the number of things that have not ended."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(words), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task(words, total=count)
        yield lambda num_left: bar.update(task, completed=count - num_left)


def _decisions(loaded: LoadedModel, engine: Engine[ModelRunner], why: str) -> tuple[str, ...]:
    """What was chosen, in words; ``why``: so many KV blocks."""
    model, limits, kv_mib = loaded.model, engine.limits, engine.runner.kv.num_bytes / (1 << 20)
    in_fp8 = f" in fp8, scales {model.kv_scales}" if model.has_byte_cache else ""
    because = f": {why}" if why else ""
    return (
        f"{str(model.dtype).removeprefix('torch.')}: {loaded.dtype_choice.reason}",
        f"attention {model.attention.name} on {model.device}{_over(model.ranks.size)}",
        f"{limits.num_blocks} KV blocks of {limits.block_size} tokens{in_fp8}, {kv_mib:.0f} MiB{because}",
        *_host_says(engine),
        f"max_model_len {limits.max_model_len}",
    )


def _host_says(engine: Engine[ModelRunner]) -> tuple[str, ...]:
    """The memory for swapping, if there is any."""
    host = engine.runner.kv.host
    if host is None:
        return ()
    return (f"{host.num_blocks} KV blocks in host memory, {host.num_bytes / (1 << 20):.0f} MiB a rank",)


def _over(num_ranks: int) -> str:
    return "" if num_ranks == 1 else f", over {num_ranks} ranks"
