"""The engine: a loop around the shared policy, a model runner, and the completions of its callers."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import torch

from pagedserve.engine.detokenize import TokenPieces
from pagedserve.engine.loop import EngineLoop
from pagedserve.engine.model.model import Model
from pagedserve.engine.output_text import OutputTextState
from pagedserve.engine.outputs import CompletionState, Delta
from pagedserve.engine.params import SamplingParams, check_token_ids
from pagedserve.engine.runner import ModelRunner
from pagedserve.engine.sequences import SequenceState
from pagedserve.engine.stops import TokenStops
from pagedserve.kernels.kv_cache import KVCache
from pagedserve.metrics.header import run_header
from pagedserve.metrics.record import RunRecord
from pagedserve.metrics.recorder import Recorder
from pagedserve.policy import Finished, Limits, Policy, Request, RequestRefused, Scheduler

Listener = Callable[[Delta], None]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the engine needs of a tokenizer: ids, bytes of tokens, and what ends an output."""

    size: int
    eos_token_ids: frozenset[int]
    pieces: TokenPieces
    encode: Callable[[str], list[int]]


class Engine:
    """Requests in, deltas out; `step` does the work in whatever thread calls it.

    ``submit`` and ``abort`` may be called from any thread. Listeners are called in the thread of `step`. The
    policy is a specification: the engine works on a deep copy of it.
    """

    def __init__(
        self,
        model: Model,
        vocabulary: Vocabulary,
        policy: Policy,
        limits: Limits,
        *,
        overlap_depth: int = 0,
        seed: int | None = None,
        kv: KVCache | None = None,
    ) -> None:
        """``kv``: a cache of the limits' size, of an idle engine, to use instead of a new one.

        Raises ValueError if the limits ask for more positions than the model has, or an EOS id is no token.
        """
        num_positions = min(model.max_model_len, model.config.max_position_embeddings)
        if limits.max_model_len > num_positions:
            raise ValueError(
                f"max_model_len is {limits.max_model_len}; the model has {num_positions} positions: lower it"
            )
        check_token_ids("eos_token_ids", sorted(vocabulary.eos_token_ids), vocabulary.size)
        self.vocabulary = vocabulary
        self.limits = limits
        self.scheduler = Scheduler(policy, limits, overlap_depth)
        self.runner = ModelRunner(
            model, limits, vocabulary.size, overlap_depth > 0, policy.enable_prefix_caching, kv
        )
        self.recorder = Recorder(self.scheduler, keep_plans=True)
        self.loop = EngineLoop(self.scheduler, self.runner, self.recorder)
        self.loop.on_commit = self._committed
        self.loop.on_abort = self._end
        self.loop.on_refused = self._refused
        self._seeds = random.Random(seed)
        self._next_id = 0
        self._lock = threading.Lock()
        self._live: dict[int, tuple[CompletionState, Listener | None]] = {}

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        listener: Listener | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str | None = None,
        stop_after: int | None = None,
        due_ns: int | None = None,
    ) -> list[CompletionState]:
        """Hand a prompt in; ``params.n`` completions come back, which grow as the engine steps.

        ``prompt`` is text or token ids. ``stop_after`` scripts a stop after so many output tokens (a replay's
        true length). Raises ValueError for ids outside the vocabulary or a prompt that can never run.
        """
        arrival_ns = self.loop.clock()  # before the prompt is tokenised: that is time its caller waits
        params.validate_for_vocab(self.vocabulary.size)
        ids = (
            self.vocabulary.encode(prompt) if isinstance(prompt, str) else [index(token) for token in prompt]
        )
        check_token_ids("prompt", ids, self.vocabulary.size)
        keys: list[bytes] = []
        root = b""
        if self.runner.keys is not None:
            root = self.runner.keys.root(cache_salt)
            self.runner.keys.extend(keys, root, ids, len(ids) // self.limits.block_size)
        caching = self.runner.keys is not None
        with self._lock:
            first, self._next_id = self._next_id, self._next_id + params.n
            seed = self._seeds.randrange(-(1 << 63), 1 << 63) if params.seed is None else params.seed
        states = []
        for sample_index in range(params.n):
            request = Request(
                first + sample_index,
                arrival_ns,
                len(ids),
                params.max_tokens,
                tuple(keys) if caching else None,
                priority,
                tenant,
            )
            self.limits.output_limit(request)
            stops = TokenStops.for_request(params, self.vocabulary.eos_token_ids)
            text = OutputTextState(params, self.vocabulary.pieces, prompt_ids=ids)
            sequence = SequenceState(
                request, params, list(ids), stops, text, seed, sample_index, root, list(keys), stop_after
            )
            states.append(CompletionState(sequence))
        for state in states:
            request = state.sequence.request
            self._live[request.id] = (state, listener)
            self.runner.expect(state.sequence)
            self.loop.add(request, due_ns)
        return states

    def abort(self, request: int, reason: str = "abort") -> None:
        """Ask for a request's end; nothing happens if it has ended."""
        self.loop.abort(request, reason)

    def abort_all(self, reason: str = "abort") -> None:
        """Ask for the end of every request that was handed in."""
        for request in list(self._live):
            self.abort(request, reason)

    def step(self) -> bool:
        """One turn of the loop; False when there is nothing to do until something is handed in."""
        return self.loop.step()

    @property
    def has_work(self) -> bool:
        """Whether any request is handed in or alive, or a step in flight."""
        return self.loop.has_work

    @property
    def is_ready(self) -> bool:
        """Whether a step would do something now."""
        return self.loop.is_ready

    @property
    def seconds_to_wake(self) -> float | None:
        """How long it may sleep unless something is handed in; None: for ever."""
        wake_ns = self.loop.wake_ns
        return None if wake_ns is None else max(0, wake_ns - self.loop.clock()) / 1e9

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def close(self) -> None:
        """Stop the device thread."""
        self.runner.close()

    def record(self, trace: dict[str, Any] | None = None) -> RunRecord:
        """The run so far, with its plans, so that it can be replayed by `simulate`."""
        model = self.runner.model
        device = {
            "name": str(model.device),
            "dtype": str(model.dtype).removeprefix("torch."),
            "attention": model.attention.name,
            "num_threads": torch.get_num_threads(),
        }
        header = run_header("live", self.scheduler, trace=trace or {}, device=device, packages=("torch",))
        return self.recorder.record(header)

    def _committed(self, finished: list[Finished]) -> None:
        for event in self.runner.events:
            live = self._live.get(event.request)
            if live is not None:
                self._tell(live[1], live[0].take(event))
        for end in finished:
            self._end(end.request, end.reason)

    def _end(self, request: int, reason: str) -> None:
        state, listener = self._live.pop(request)
        state.sequence.ended = True
        if state.sequence.seat is None:
            self.runner.forget(request)
        self._tell(listener, state.finish(reason))

    def _refused(self, request: Request, error: RequestRefused) -> None:
        state, listener = self._live.pop(request.id)
        self.runner.forget(request.id)
        state.error = str(error)
        self._tell(listener, state.finish("error"))

    @staticmethod
    def _tell(listener: Listener | None, delta: Delta) -> None:
        if listener is not None:
            listener(delta)
