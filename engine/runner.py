"""The model runner: owns the device, executes plans, samples, and says who stopped."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from pagedserve.engine.graphs import DecodeGraphs
from pagedserve.engine.keys import PrefixKeys
from pagedserve.engine.layout import sampled_by
from pagedserve.engine.model.model import Model
from pagedserve.engine.packing import HostCopies
from pagedserve.engine.parallel.ranks import NO_RANKS, Begin, Ranks, Step, newcomers_of, resumed_of
from pagedserve.engine.params import SamplingParams
from pagedserve.engine.prompt_logprobs import PromptRows, prompt_rows
from pagedserve.engine.runners import RunnerFacts
from pagedserve.engine.sampling.logprobs import LogprobBatch
from pagedserve.engine.sampling.rows import SamplingBatch, SamplingRows
from pagedserve.engine.sampling.sampler import SampledTokens, sample
from pagedserve.engine.sequences import SequenceState, SequenceTable, StepInputs
from pagedserve.engine.swapping import host_cache_of, run_swaps
from pagedserve.engine.token_events import TokenEvent, filled_keys, outcomes_of, token_event
from pagedserve.kernels.kv_cache import KVCache
from pagedserve.policy import Limits, Outcome, StepPlan


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step computed, on the host once ``copies`` are there. sampled: None if no row was to be sampled.

    prompt_logprobs: for each of the step's `PromptRows`, of its targets.
    """

    sampled: SampledTokens | None
    prompt_logprobs: tuple[LogprobBatch, ...]
    copies: HostCopies


@dataclass(slots=True)
class LaunchedState:
    """A step from launch to wait: ``run`` computes it, in the worker thread when steps overlap.

    ``sequences``: those that it says something of, which may have departed with a later plan when it is waited for.
    """

    plan: StepPlan
    sampled: tuple[int, ...]
    sequences: dict[int, SequenceState]
    prompts: Sequence[PromptRows]
    run: Callable[[], StepResult]
    future: Future[StepResult] | None = None


class ModelRunner:
    """Executes plans on one device, in order.

    ``launch`` follows the plan's changes and lays out its inputs; the step itself is computed in ``wait``, or
    in a thread of its own when steps overlap, which a GPU's work is only put in line by. What a step samples stays
    on the device for the next one (`SequenceTable`), so that this can be launched before the host knows it.
    ``wait`` brings it to the host and decides stops: by token id, by string, or scripted. ``events`` has the tokens
    of the step waited for.
    """

    def __init__(
        self,
        model: Model,
        limits: Limits,
        vocab_size: int,
        overlaps: bool,
        caches_prefixes: bool,
        kv: KVCache | None = None,
        ranks: Ranks = NO_RANKS,
    ) -> None:
        """``kv``: a cache of the limits' size to use instead of a new one. ``ranks``: those that compute along."""
        ranks.send(Begin(limits, reuses_cache=kv is not None))
        self._ranks = ranks
        self.model = model
        self.kv = kv or model.make_cache(limits.num_blocks, limits.block_size)
        assert (self.kv.num_blocks, self.kv.block_size) == (limits.num_blocks, limits.block_size)
        self._host = host_cache_of(self.kv, limits)
        self.table = SequenceTable[SequenceState](
            limits.max_num_seqs, limits.max_model_len, limits.block_size, torch.device(model.device)
        )
        self.rows = SamplingRows(vocab_size, model.device)
        self.keys = PrefixKeys(limits.block_size) if caches_prefixes else None
        self.events: list[TokenEvent] = []
        self.graphs: DecodeGraphs | None = None
        """Recorded decode steps, if there are any; used wherever one is large enough."""
        self._newcomers: dict[int, SequenceState] = {}
        self._launched: deque[LaunchedState] = deque()
        self._thread = (
            ThreadPoolExecutor(1, "pagedserve-device", _enter_thread, (model.device,)) if overlaps else None
        )

    def expect(self, sequence: SequenceState) -> None:
        """Take what the scheduler does not know of a request, before it is added there."""
        self._newcomers[sequence.request.id] = sequence

    def forget(self, request: int) -> None:
        """A request was refused or ended before any step; others go as plans name them departed."""
        self._newcomers.pop(request, None)

    def check(self, params: SamplingParams) -> None:
        """A model can do all that the parameters allow."""

    @property
    def facts(self) -> RunnerFacts:
        """See `pagedserve.engine.runners.EngineRunner.facts`."""
        device = {
            "name": str(self.model.device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "attention": self.model.attention.name,
            "num_threads": torch.get_num_threads(),
        }
        return RunnerFacts("live", device, packages=("torch",))

    def hurry(self) -> None:
        """A step that computes takes its time."""

    def close(self) -> None:
        """Stop the device thread; call when no step is in flight."""
        if self._thread is not None:
            self._thread.shutdown()

    def can_launch_ahead(self, plan: StepPlan) -> bool:
        """See `pagedserve.engine.loop.Runner.can_launch_ahead`.

        Not if a request is to be sampled whose logits change with its output, as by a grammar or by penalties,
        and whose last token is in flight.
        """
        if self._thread is None:
            return False
        asked = self.rows.told_by_tokens
        if not asked:
            return True
        asked = asked.intersection(sampled_by(plan))
        return all(asked.isdisjoint(step.sampled) for step in self._launched)

    def launch(self, plan: StepPlan) -> None:
        """Start a step; see `pagedserve.engine.loop.Runner.launch`."""
        newcomers = [self._newcomers[request.id] for request in plan.new_requests]
        for request in self.table.apply(plan, self._newcomers):
            self.rows.remove(request)
        for sequence in newcomers:
            del self._newcomers[sequence.request.id]
            self.rows.add(
                sequence.request.id,
                sequence.params,
                seed=sequence.seed,
                prompt_ids=sequence.token_ids,
                sample_index=sequence.sample_index,
                suppressed_ids=sequence.stops.suppressed_ids,
                grammar=sequence.grammar,
            )
        inputs, sampled = self.table.lay_out(plan), sampled_by(plan)
        choice = self.rows.select(sampled, inputs.positions) if sampled else None
        prompts = prompt_rows(plan, self.table.sequences)
        if self._ranks.size > 1:
            told = newcomers_of(plan, [sequence.token_ids for sequence in newcomers])
            self._ranks.send(Step(plan, told, resumed_of(self.table.seated), tuple(prompts)))
        concerned = {*sampled, *(rows.request for rows in prompts), *(request for request, _ in plan.filled)}
        sequences = {request: self.table.sequences[request] for request in concerned}
        step = LaunchedState(
            plan, sampled, sequences, prompts, lambda: self._compute(plan, inputs, choice, prompts)
        )
        if self._thread is not None:
            step.future = self._thread.submit(step.run)
        self._launched.append(step)

    def wait(self) -> Sequence[Outcome]:
        """Finish the oldest launched step; see `pagedserve.engine.loop.Runner.wait`."""
        step = self._launched.popleft()
        result = step.run() if step.future is None else step.future.result()
        result.copies.wait()
        for rows, found in zip(step.prompts, result.prompt_logprobs, strict=True):
            step.sequences[rows.request].prompt_logprobs += rows.positions(found)
        self.events = [] if result.sampled is None else self._take(step, result.sampled)
        keys = filled_keys(step.plan, step.sequences, self.keys)
        return outcomes_of(step.sampled, self.events, keys)

    @torch.inference_mode()
    def _compute(
        self,
        plan: StepPlan,
        inputs: StepInputs,
        choice: SamplingBatch | None,
        prompts: Sequence[PromptRows],
    ) -> StepResult:
        """On a GPU everything is put in line, and nothing waited for."""
        _enter_thread(self.model.device)  # at depth 0 it is whichever thread steps
        if self._host is not None:
            run_swaps(self.kv, self._host, plan)
        batch, copies = self.table.complete(inputs), HostCopies(self.model.device)
        is_decode = batch.num_decodes == batch.num_sequences
        logits = self.graphs.logits(batch) if self.graphs is not None and is_decode else None
        found: list[LogprobBatch] = []
        if logits is None:
            hidden = self.model.forward(batch, self.kv)
            found = [rows.logprobs(self.model, hidden, self.rows.vocab_size) for rows in prompts]
            logits = self.model.logits(hidden[inputs.last_rows]) if choice is not None else None
        sampled = None
        if choice is not None:
            assert logits is not None
            sampled = sample(logits, choice)
            self.table.keep(inputs, self.model.communicator.share(sampled.tokens))
            sampled = sampled.copied(copies.take)
        told = tuple(each.copied(copies.take) for each in found)
        copies.close()
        return StepResult(sampled, told, copies)

    def _take(self, step: LaunchedState, result: SampledTokens) -> list[TokenEvent]:
        tokens, errors, logprobs = result.tokens.tolist(), result.errors(), result.logprobs()
        events = []
        for request, token_id in zip(step.sampled, tokens, strict=True):
            sequence = step.sequences[request]
            if sequence.ended:
                continue
            if request in errors:
                sequence.ended = True
                # A step in flight may compute on from whatever was chosen; its row is discarded.
                sequence.token_ids.append(0)
                events.append(TokenEvent(request, None, "", "error", error=errors[request]))
                continue
            sequence.token_ids.append(token_id)
            self.rows.append(request, token_id)
            events.append(token_event(sequence, token_id, logprobs.get(request)))
        return events


def _enter_thread(device: torch.device) -> None:
    """A thread begins on the first GPU, and kernels run on their thread's own."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
