"""A rank other than the first: follows rank 0's plans with its own part of the model, and samples nothing."""

from __future__ import annotations

from dataclasses import dataclass

from pagedserve.engine.largest_step import largest_step
from pagedserve.engine.layout import last_rows_of, sampled_by
from pagedserve.engine.model.model import Model
from pagedserve.engine.parallel.ranks import Begin, Largest, Message, Step, Tokens
from pagedserve.engine.sequences import MirrorState, SequenceTable
from pagedserve.kernels.kv_cache import KVCache
from pagedserve.policy import Limits


@dataclass(slots=True)
class _EngineState:
    limits: Limits
    table: SequenceTable
    kv: KVCache


class Worker:
    """Computes what it is told, in the order in which it is told."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._engine: _EngineState | None = None

    def take(self, message: Message) -> None:
        """Do what a message says."""
        if isinstance(message, Begin):
            self._begin(message)
        elif isinstance(message, Largest):
            largest_step(self._model, message.limits)
        elif isinstance(message, Step):
            self._step(message)
        else:
            self._tokens(message)

    def _begin(self, message: Begin) -> None:
        limits, model = message.limits, self._model
        reused = self._engine.kv if message.reuses_cache and self._engine is not None else None
        table = SequenceTable(limits.max_num_seqs, limits.max_model_len, limits.block_size, model.device)
        self._engine = None  # its cache is free before another is made
        kv = model.make_cache(limits.num_blocks, limits.block_size) if reused is None else reused
        self._engine = _EngineState(limits, table, kv)

    def _step(self, message: Step) -> None:
        engine, model, plan = self._engine, self._model, message.plan
        assert engine is not None, "a step before any engine"
        newcomers = {
            new.request.id: MirrorState(new.request, list(new.token_ids)) for new in message.newcomers
        }
        engine.table.apply(plan, newcomers)
        hidden = model.forward(engine.table.batch(plan), engine.kv)
        for rows in message.prompts:
            for part in rows.parts():
                model.logits(hidden[part])
        if sampled_by(plan):
            model.logits(hidden[last_rows_of(plan).to(hidden.device)])

    def _tokens(self, message: Tokens) -> None:
        assert self._engine is not None, "tokens before any engine"
        table = self._engine.table
        for request, token_id in message.chosen:
            table.append_token(table.sequences[request], token_id)
