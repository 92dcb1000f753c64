"""The model runner: owns the device, executes plans, samples, and says who stopped."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from pagedserve.engine.graphs import DecodeGraphs
from pagedserve.engine.keys import PrefixKeys
from pagedserve.engine.layout import last_rows_of, sampled_by
from pagedserve.engine.model.batch import ForwardBatch
from pagedserve.engine.model.model import Model
from pagedserve.engine.parallel.ranks import NO_RANKS, Begin, Ranks, Step, Tokens, newcomers_of
from pagedserve.engine.params import SamplingParams
from pagedserve.engine.prompt_logprobs import PromptRows, prompt_rows
from pagedserve.engine.runners import RunnerFacts
from pagedserve.engine.sampling.logprobs import PositionLogprobs
from pagedserve.engine.sampling.rows import SamplingBatch, SamplingRows
from pagedserve.engine.sampling.sampler import SampledTokens, sample
from pagedserve.engine.sequences import SequenceState, SequenceTable
from pagedserve.engine.token_events import TokenEvent, filled_keys, outcomes_of, token_event
from pagedserve.kernels.kv_cache import KVCache
from pagedserve.policy import Limits, Outcome, StepPlan


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step computed. sampled: None if no row was to be sampled.

    prompt_logprobs: by request, of the prompt tokens that follow those computed.
    """

    sampled: SampledTokens | None
    prompt_logprobs: dict[int, list[PositionLogprobs]]


@dataclass(slots=True)
class LaunchedState:
    """A step from launch to wait: ``run`` computes it, in the worker thread when steps overlap."""

    plan: StepPlan
    sampled: tuple[int, ...]
    run: Callable[[], StepResult]
    future: Future[StepResult] | None = None


class ModelRunner:
    """Executes plans on one device, in order.

    ``launch`` follows the plan's changes and lays out its inputs; the step itself is computed in ``wait``, or
    in a thread of its own when steps overlap, so that the next one can be scheduled meanwhile. ``wait`` also
    decides stops: by token id, by string, or scripted. ``events`` has the tokens of the step waited for.
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
        self._thread = ThreadPoolExecutor(1, "pagedserve-device") if overlaps else None

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
        batch = self.table.batch(plan)
        sampled, last_rows = sampled_by(plan), last_rows_of(plan)
        choice = self.rows.select(sampled, self._positions(sampled)) if sampled else None
        prompts = prompt_rows(plan, self.table.sequences)
        if self._ranks.size > 1:
            told = newcomers_of(plan, [sequence.token_ids for sequence in newcomers])
            self._ranks.send(Step(plan, told, tuple(prompts)))
        step = LaunchedState(plan, sampled, lambda: self._compute(batch, last_rows, choice, prompts))
        if self._thread is not None:
            step.future = self._thread.submit(step.run)
        self._launched.append(step)

    def wait(self) -> Sequence[Outcome]:
        """Finish the oldest launched step; see `pagedserve.engine.loop.Runner.wait`."""
        step = self._launched.popleft()
        result = step.run() if step.future is None else step.future.result()
        for request, found in result.prompt_logprobs.items():
            self.table.sequences[request].prompt_logprobs += found
        self.events = [] if result.sampled is None else self._take(step.sampled, result.sampled)
        self._ranks.send(Tokens(tuple((event.request, event.token_id or 0) for event in self.events)))
        keys = filled_keys(step.plan, self.table.sequences, self.keys)
        return outcomes_of(step.sampled, self.events, keys)

    def _positions(self, sampled: tuple[int, ...]) -> list[int]:
        """For every row the index of the token to be chosen: the number of tokens before it."""
        return [len(self.table.sequences[request].token_ids) for request in sampled]

    def _compute(
        self,
        batch: ForwardBatch,
        last_rows: torch.Tensor,
        choice: SamplingBatch | None,
        prompts: Sequence[PromptRows],
    ) -> StepResult:
        is_decode = batch.num_decodes == batch.num_sequences
        logits = self.graphs.logits(batch) if self.graphs is not None and is_decode else None
        if logits is not None and choice is not None:
            with torch.inference_mode():
                return StepResult(sample(logits, choice), {})
        hidden = self.model.forward(batch, self.kv)
        with torch.inference_mode():
            found = {
                rows.request: rows.logprobs(self.model, hidden, self.rows.vocab_size) for rows in prompts
            }
            if choice is None:
                return StepResult(None, found)
            return StepResult(sample(self.model.logits(hidden[last_rows.to(hidden.device)]), choice), found)

    def _take(self, sampled: tuple[int, ...], result: SampledTokens) -> list[TokenEvent]:
        tokens, errors, logprobs = result.tokens.tolist(), result.errors(), result.logprobs()
        events = []
        for request, token_id in zip(sampled, tokens, strict=True):
            sequence = self.table.sequences[request]
            if sequence.ended:
                continue
            if request in errors:
                sequence.ended = True
                # A step in flight may compute on from here; its row is discarded.
                self.table.append_token(sequence, 0)
                events.append(TokenEvent(request, None, "", "error", error=errors[request]))
                continue
            self.table.append_token(sequence, token_id)
            self.rows.append(request, token_id)
            events.append(token_event(sequence, token_id, logprobs.get(request)))
        return events
