"""Serving from a cost model instead of a device: step times, output lengths, and what then has no meaning."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from pagedserve.cli.device_options import COSTS, DEFAULT_DEVICE, DeviceOptions, Setup
from pagedserve.cli.engine_options import EngineOptions
from pagedserve.cli.errors import refuse
from pagedserve.cli.flags import given
from pagedserve.cli.option_kinds import choice, microseconds
from pagedserve.cli.synthetic_options import LENGTHS, parsed_lengths
from pagedserve.simulator.devices import DEVICES

if TYPE_CHECKING:
    from pagedserve.engine.host_memory import HostMemory
    from pagedserve.engine.model.load import ModelOutline
    from pagedserve.policy import Policy
    from pagedserve.validation.wall_time_llm import WallTimeLLM

PANEL = "Simulated engine (with --engine simulated)"
COMPUTING = (
    "dtype",
    "device",
    "attention",
    "kv_cache_dtype",
    "calculate_kv_scales",
    "tensor_parallel_size",
    "gpu_memory_utilization",
    "enforce_eager",
)
# Who wakes at the end of a step needs the interpreter's lock, and by default another thread may keep it for 5 ms:
# longer than a GPU's step.
SWITCH_S = 0.0005
TIMES = ("step_us", "prefill_token_us", "decode_us", "swap_block_us", "host_gap_us")


@dataclass(frozen=True, slots=True)
class SimulatedOptions:
    """What makes the tokens, and how long simulated steps take; None: not given."""

    engine: Annotated[
        str,
        choice(
            "simulated: no weights, filler tokens, and the times of --profile or --cost in real time.",
            PANEL,
            "live",
            "simulated",
        ),
    ] = "live"
    profile: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Step times of this model: what 'pagedserve profile' wrote.",
            rich_help_panel=PANEL,
        ),
    ] = None
    cost: Annotated[
        str | None,
        choice(
            "Step times as in 'pagedserve simulate'; the default is measured, with --profile.", PANEL, *COSTS
        ),
    ] = None
    simulated_device: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help=f"With --cost roofline: one of {', '.join(DEVICES)}; the default is {DEFAULT_DEVICE}.",
            rich_help_panel=PANEL,
        ),
    ] = None
    step_us: Annotated[float | None, microseconds("With --cost constant: time of a step.", PANEL)] = None
    prefill_token_us: Annotated[float | None, microseconds("More for every prefill token.", PANEL)] = None
    decode_us: Annotated[float | None, microseconds("More for every decode.", PANEL)] = None
    swap_block_us: Annotated[float | None, microseconds("More for every block swapped.", PANEL)] = None
    host_gap_us: Annotated[
        float | None,
        microseconds("Host time between schedule and launch of a step (roofline, constant).", PANEL),
    ] = None
    output_len: Annotated[
        str | None,
        Option(
            metavar="DIST",
            help=f"After how many tokens outputs stop, unless ignore_eos is set: {LENGTHS}; the default is "
            "max_tokens.",
            rich_help_panel=PANEL,
        ),
    ] = None

    @property
    def is_simulated(self) -> bool:
        """Whether no model computes."""
        return self.engine == "simulated"

    def check(self, engine: EngineOptions) -> None:
        """Refuse what has no meaning with this kind of engine, before a model is looked for."""
        if not self.is_simulated:
            if found := given(self):
                told = "only a simulated engine has this; leave it out or give --engine simulated"
                refuse(f"{', '.join(found)}: {told}")
            return
        if found := given(engine, COMPUTING):
            refuse(f"{', '.join(found)}: a simulated engine computes nothing; leave it out")
        if self.profile is not None and self._cost != "measured":
            refuse(f"--cost {self.cost} and --profile both give step times; give one of them")
        if self.profile is None and self._cost == "measured":
            refuse(
                "--engine simulated needs step times: --profile FILE ('pagedserve profile' writes one), --cost "
                "roofline with --simulated-device NAME, or --cost constant with --step-us US"
            )
        if self.simulated_device is not None and self._cost != "roofline":
            refuse(
                f"--simulated-device {self.simulated_device}: only --cost roofline goes by a device; leave it out"
            )
        if self.output_len is not None:
            parsed_lengths("--output-len", self.output_len)

    @property
    def _cost(self) -> str:
        return self.cost or "measured"

    def start(
        self,
        engine: EngineOptions,
        policy: Policy,
        overlap_depth: int,
        *,
        host: HostMemory,
        record: bool,
    ) -> WallTimeLLM:
        """The engine. ValueError says what does not exist or fit."""
        from pagedserve.engine.heap import settle_heap
        from pagedserve.engine.model.load import load_outline
        from pagedserve.validation.wall_time_llm import WallTimeLLM, geometry_of

        outline = load_outline(engine.model)
        setup = self._setup(engine, outline)
        block_bytes = geometry_of(outline.config, engine.model).kv_bytes_per_token * engine.block_size
        lengths = None if self.output_len is None else parsed_lengths("--output-len", self.output_len)
        llm = WallTimeLLM(
            outline,
            setup.cost,
            policy,
            num_blocks=setup.num_blocks,
            num_cpu_blocks=host.num_blocks(block_bytes),
            max_model_len=engine.max_model_len,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            block_size=engine.block_size,
            overlap_depth=overlap_depth,
            lengths=lengths,
            record=record,
            sources=setup.lines,
        )
        settle_heap()
        sys.setswitchinterval(SWITCH_S)
        return llm

    def _setup(self, engine: EngineOptions, outline: ModelOutline) -> Setup:
        from pagedserve.simulator.measured import MeasuredCost
        from pagedserve.validation.profiles import check_geometry
        from pagedserve.validation.wall_time_llm import geometry_of

        device = DeviceOptions(
            cost=self._cost,
            device=self.simulated_device,
            num_blocks=engine.num_blocks,
            profile=self.profile,
            **{name: getattr(self, name) for name in TIMES},
        )
        setup = device.decide(engine.block_size, geometry_of(outline.config, engine.model))
        if isinstance(setup.cost, MeasuredCost):
            check_geometry(setup.cost.profile, outline.config)
        return setup
