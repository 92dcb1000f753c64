"""A model's tokenizer and policy on simulated steps: what a server needs of an `LLM`, without its weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pagedserve.engine.engine import Engine
from pagedserve.engine.llm import DEFAULT_MAX_MODEL_LEN, make_vocabulary
from pagedserve.engine.model.config import ModelConfig
from pagedserve.engine.model.load import ModelOutline
from pagedserve.engine.model.tokenizer import load_tokenizer
from pagedserve.metrics.record import RunRecord
from pagedserve.policy import Limits, Policy
from pagedserve.simulator.cost import CostModel, check_priced
from pagedserve.simulator.geometry import ModelGeometry
from pagedserve.simulator.wall_time import WallClock, WallTimeState
from pagedserve.traces.lengths import LengthDist
from pagedserve.validation.wall_time_engine import WallTimeModel, WallTimeRunner, wall_time_engine


class WallTimeLLM:
    """Answers with filler tokens at the times that a cost model gives.

    ``decisions`` says in words what is simulated and what was chosen for you.
    """

    def __init__(
        self,
        outline: ModelOutline,
        cost: CostModel,
        policy: Policy,
        *,
        num_blocks: int,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        block_size: int = 16,
        num_cpu_blocks: int = 0,
        overlap_depth: int = 0,
        lengths: LengthDist | None = None,
        seed: int | None = None,
        record: bool = True,
        clock: WallClock | None = None,
        sources: tuple[str, ...] = (),
    ) -> None:
        """``lengths``: of outputs that do not ignore EOS; None: all run to their ``max_tokens``.

        ``sources`` say where times and pool come from.
        """
        num_positions = outline.config.max_position_embeddings
        limits = Limits(
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len or min(num_positions, DEFAULT_MAX_MODEL_LEN),
            block_size=block_size,
            num_blocks=num_blocks,
            num_cpu_blocks=num_cpu_blocks,
        )
        check_priced(cost, policy, limits)
        self.tokenizer = load_tokenizer(outline.files)
        self.wall = WallTimeState(cost, clock)
        self.engine: Engine[WallTimeRunner] = wall_time_engine(
            WallTimeModel(self.wall, num_positions, lengths),
            make_vocabulary(outline.config, outline.files, self.tokenizer),
            policy,
            limits,
            overlap_depth=overlap_depth,
            seed=seed,
            record=record,
        )
        drawn = "run to max_tokens" if lengths is None else f"stop at EOS, lengths {lengths}"
        self.decisions = (
            f"simulated engine: no weights, filler tokens, steps in real time; outputs {drawn}",
            *sources,
            *([f"{num_cpu_blocks} KV blocks in host memory"] if num_cpu_blocks else []),
            f"max_model_len {limits.max_model_len}",
        )

    @property
    def punctuality(self) -> str:
        """How well the steps kept their times, in words."""
        wall = self.wall
        if not wall.num_steps:
            return "no step was simulated"
        mean_us, max_ms = wall.late_ns / wall.num_steps / 1e3, wall.max_late_ns / 1e6
        return (
            f"{wall.num_steps:,} steps in wall time: {mean_us:,.0f} us late on average, {max_ms:,.1f} ms at "
            f"most; in {wall.num_late_steps:,} the server's own work took longer than the step"
        )

    def close(self) -> None:
        """As `LLM.close`."""
        self.engine.close()

    def record(self, trace: dict[str, Any] | None = None) -> RunRecord:
        """The record of everything so far, of kind "simulated"."""
        return self.engine.record(trace)


def geometry_of(config: ModelConfig, name: str) -> ModelGeometry:
    """A model's configuration as the cost models know it, with two bytes a number."""
    plain = ModelGeometry(
        name=name,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        ffn_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        tie_word_embeddings=config.tie_word_embeddings,
        source=f"the configuration of {name}",
    )
    num_extra = (config.num_parameters - plain.num_params) // config.num_layers  # biases, norms of heads
    return replace(plain, num_extra_params_per_layer=num_extra)
