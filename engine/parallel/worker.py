"""A rank other than the first: follows rank 0's plans with its own part of the model, and samples nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedserve.engine.device_meter import meter_of
from pagedserve.engine.kv_memory import measure_ranks
from pagedserve.engine.model.kv_scales import calculate_scales
from pagedserve.engine.model.model import Model
from pagedserve.engine.parallel.ranks import Begin, Calibrate, Largest, Message, Step
from pagedserve.engine.sequences import MirrorState, SequenceTable
from pagedserve.engine.swapping import host_cache_of, run_swaps
from pagedserve.kernels.host_cache import HostCache
from pagedserve.kernels.kv_cache import KVCache
from pagedserve.policy import Limits


@dataclass(slots=True)
class _EngineState:
    limits: Limits
    table: SequenceTable[MirrorState]
    kv: KVCache
    host: HostCache | None


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
            meter = meter_of(self._model.device)
            assert meter is not None, f"{self._model.device}: rank 0 asks CUDA devices alone"
            measure_ranks(self._model, message.limits, meter, has_graphs=False)
        elif isinstance(message, Calibrate):
            calculate_scales(self._model, message.prompts)
        else:
            self._step(message)

    def _begin(self, message: Begin) -> None:
        limits, model = message.limits, self._model
        reused = self._engine.kv if message.reuses_cache and self._engine is not None else None
        table = SequenceTable[MirrorState](
            limits.max_num_seqs, limits.max_model_len, limits.block_size, model.device
        )
        self._engine = None  # its cache is free before another is made
        kv = model.make_cache(limits.num_blocks, limits.block_size) if reused is None else reused
        self._engine = _EngineState(limits, table, kv, host_cache_of(kv, limits))

    def _step(self, message: Step) -> None:
        engine, model, plan = self._engine, self._model, message.plan
        assert engine is not None, "a step before any engine"
        newcomers = {
            new.request.id: MirrorState(new.request, list(new.token_ids)) for new in message.newcomers
        }
        table = engine.table
        for resumed in message.resumed:
            sequence = table.sequences[resumed.request]
            sequence.token_ids[sequence.request.num_prompt_tokens :] = resumed.output_ids
        table.apply(plan, newcomers)
        inputs = table.lay_out(plan)
        if engine.host is not None:
            run_swaps(engine.kv, engine.host, plan)
        hidden = model.forward(table.complete(inputs), engine.kv)
        for rows in message.prompts:
            for part in rows.parts():
                model.logits(hidden[part])
        if len(inputs.last_rows):
            model.logits(hidden[inputs.last_rows])
            table.keep(inputs, model.communicator.share(torch.empty_like(inputs.sampled_seats)))
