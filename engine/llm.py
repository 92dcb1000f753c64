"""`LLM`: a model in a variable, for scripts and notebooks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from numbers import Integral
from pathlib import Path
from typing import Any

from pagedserve.engine.detokenize import TokenPieces
from pagedserve.engine.engine import Engine
from pagedserve.engine.intake import Vocabulary
from pagedserve.engine.interrupts import InterruptsState
from pagedserve.engine.model.config import ModelConfig
from pagedserve.engine.model.files import ModelFiles
from pagedserve.engine.model.load import LoadedModel, load_model
from pagedserve.engine.model.model import Model
from pagedserve.engine.model.placement import available_bytes
from pagedserve.engine.model.tokenizer import eos_token_ids, load_tokenizer
from pagedserve.engine.outputs import Completion, CompletionState
from pagedserve.engine.params import SamplingParams
from pagedserve.metrics.record import RunRecord
from pagedserve.policy import IllegalPlan, Limits, Policy
from pagedserve.policy import policy as policy_preset

KV_SHARE_OF_MEMORY = 0.3
GIB = 1 << 30
DEFAULT_KV_BYTES = GIB
DEFAULT_MAX_MODEL_LEN = 4096


class PoolTooLarge(ValueError):
    """The KV blocks asked for by ``num_blocks`` need more memory than is free."""


class _Stuck(IllegalPlan):
    """Nothing runs and nothing will."""


class LLM:
    """Loads a model and generates with any policy.

    ``model``: a directory of safetensors, a GGUF file, a hub repository, or the alias ``smollm2-135m``.
    ``policy``: a preset's name or a `Policy`, also one written in a notebook cell. ``num_blocks`` None takes
    what all sequences could use, at most 1 GiB and a third of the memory that is free. ``record`` False keeps
    no record, which otherwise grows with every step. ``tensor_parallel_size``: processes that share the model, each
    on a GPU of its own, or all on the CPU. ``decisions`` says in words what was chosen for you.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel,
        *,
        policy: str | Policy = "vllm_v1",
        dtype: str = "auto",
        device: str = "cpu",
        attention: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        block_size: int = 16,
        num_blocks: int | None = None,
        max_num_queued_reqs: int | None = None,
        overlap_depth: int = 0,
        seed: int | None = None,
        progress: bool = True,
        record: bool = True,
        tensor_parallel_size: int = 1,
    ) -> None:
        spec = policy if isinstance(policy, Policy) else policy_preset(policy)
        how = {"dtype": dtype, "device": device, "attention": attention, "max_model_len": max_model_len}
        loaded = _loaded(model, tensor_parallel_size, progress, **how)
        self.model = loaded.model
        self.tokenizer = load_tokenizer(loaded.files)
        if max_model_len is None:
            max_model_len = min(self.model.max_model_len, DEFAULT_MAX_MODEL_LEN)
        if num_blocks is None:
            num_blocks = default_num_blocks(loaded, max_model_len, max_num_seqs, block_size)
        else:
            check_num_blocks(loaded, num_blocks, block_size)
        limits = Limits(
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_queued_reqs=max_num_queued_reqs,
        )
        self.engine = Engine(
            self.model,
            vocabulary_of(loaded, self.tokenizer),
            spec,
            limits,
            overlap_depth=overlap_depth,
            seed=seed,
            record=record,
        )
        kv_mib = self.engine.runner.kv.num_bytes / (1 << 20)
        self.decisions = (
            f"{str(self.model.dtype).removeprefix('torch.')}: {loaded.dtype_choice.reason}",
            f"attention {self.model.attention.name} on {self.model.device}{_over(self.model.ranks.size)}",
            f"{num_blocks} KV blocks of {block_size} tokens, {kv_mib:.0f} MiB",
            f"max_model_len {max_model_len}",
        )

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
        asked = (how["dtype"], how["device"], how["attention"], tensor_parallel_size)
        if asked != ("auto", "cpu", "auto", 1):
            raise ValueError("the model is loaded already; give dtype, device and attention to load_model")
        return model
    if tensor_parallel_size == 1:
        return load_model(model, **how, progress=progress)
    from pagedserve.engine.parallel.processes import load_sharded

    return load_sharded(model, tensor_parallel_size, **how, progress=progress)


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
def progress_bar(num_requests: int) -> Iterator[Callable[[int], None]]:
    """A bar on the screen; call what it gives with the number of requests that have not ended."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task("generating", total=num_requests)
        yield lambda num_live: bar.update(task, completed=num_requests - num_live)


def default_num_blocks(loaded: LoadedModel, max_model_len: int, max_num_seqs: int, block_size: int) -> int:
    """Blocks for ``max_num_seqs`` sequences of full length, within ``DEFAULT_KV_BYTES`` and the free memory.

    One sequence of full length always gets its blocks, if they fit a third of the free memory.
    """
    one = -(-max_model_len // block_size)
    block_bytes = _block_bytes(loaded.model, block_size)
    wanted = min(max_num_seqs * one, max(one, DEFAULT_KV_BYTES // block_bytes))
    free = available_bytes(loaded.model.device)
    if free is None:
        return wanted
    fits = int(free * KV_SHARE_OF_MEMORY) // block_bytes
    if fits < 1:
        raise ValueError(f"{free:,} bytes are free and one KV block takes {block_bytes:,}: free some memory")
    return min(wanted, fits)


def check_num_blocks(loaded: LoadedModel, num_blocks: int, block_size: int) -> None:
    """Raise `PoolTooLarge` if the free memory does not hold so many KV blocks."""
    block_bytes, free = _block_bytes(loaded.model, block_size), available_bytes(loaded.model.device)
    if free is not None and num_blocks * block_bytes > free:
        raise PoolTooLarge(
            f"num_blocks {num_blocks}: so many KV blocks of {block_size} tokens need "
            f"{num_blocks * block_bytes / GIB:,.2f} GiB and {free / GIB:,.2f} GiB are free: at most "
            f"{free // block_bytes} would fit; leave it out for a good number"
        )


def _over(num_ranks: int) -> str:
    return "" if num_ranks == 1 else f", over {num_ranks} ranks"


def _block_bytes(model: Model, block_size: int) -> int:
    return model.local.kv_bytes_per_token(model.dtype.itemsize) * block_size
