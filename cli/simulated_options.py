"""Serving from a cost model instead of a device: step times, output lengths, and what then has no meaning."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from pagedserve.cli.device_options import DEFAULT_DEVICE, TIME_US, DeviceOptions, Setup
from pagedserve.cli.engine_options import EngineOptions
from pagedserve.cli.errors import refuse
from pagedserve.cli.synthetic_options import LENGTHS, parsed_lengths
from pagedserve.cli.values import one_of
from pagedserve.simulator.devices import DEVICES

if TYPE_CHECKING:
    from pagedserve.engine.model.load import ModelOutline
    from pagedserve.policy import Policy
    from pagedserve.validation.wall_time_llm import WallTimeLLM

PANEL = "Simulated engine (with --engine simulated)"
COMPUTING = (
    "dtype",
    "device",
    "attention",
    "tensor_parallel_size",
    "gpu_memory_utilization",
    "enforce_eager",
)
# Who wakes at the end of a step needs the interpreter's lock, and by default another thread may keep it for 5 ms:
# longer than a GPU's step.
SWITCH_S = 0.0005
TIMES = ("step_us", "prefill_token_us", "decode_us", "host_gap_us")


@dataclass(frozen=True, slots=True)
class SimulatedOptions:
    """What makes the tokens, and how long simulated steps take; None: not given."""

    engine: Annotated[
        str,
        Option(
            parser=one_of("live", "simulated"),
            metavar="live|simulated",
            help="simulated: no weights, filler tokens, and the times of --profile or --cost in real time.",
            rich_help_panel=PANEL,
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
        Option(
            parser=one_of("roofline", "measured", "constant"),
            metavar="roofline|measured|constant",
            help="Step times as in 'pagedserve simulate'; the default is measured, with --profile.",
            rich_help_panel=PANEL,
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
    step_us: Annotated[
        float | None,
        Option(
            parser=TIME_US, metavar="US", help="With --cost constant: time of a step.", rich_help_panel=PANEL
        ),
    ] = None
    prefill_token_us: Annotated[
        float | None,
        Option(parser=TIME_US, metavar="US", help="More for every prefill token.", rich_help_panel=PANEL),
    ] = None
    decode_us: Annotated[
        float | None,
        Option(parser=TIME_US, metavar="US", help="More for every decode.", rich_help_panel=PANEL),
    ] = None
    host_gap_us: Annotated[
        float | None,
        Option(
            parser=TIME_US,
            metavar="US",
            help="Host time between schedule and launch of a step (roofline, constant).",
            rich_help_panel=PANEL,
        ),
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
            given = [name for name in _names(self) if name != "engine" and getattr(self, name) is not None]
            if given:
                refuse(
                    f"{_flags(given)}: only a simulated engine has this; leave it out or give --engine simulated"
                )
            return
        defaults = {field.name: field.default for field in fields(EngineOptions)}
        given = [name for name in COMPUTING if getattr(engine, name) != defaults[name]]
        if given:
            refuse(f"{_flags(given)}: a simulated engine computes nothing; leave it out")
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
        self, engine: EngineOptions, policy: Policy, overlap_depth: int, *, record: bool
    ) -> WallTimeLLM:
        """The engine. ValueError says what does not exist or fit."""
        from pagedserve.engine.heap import settle_heap
        from pagedserve.engine.model.load import load_outline
        from pagedserve.validation.wall_time_llm import WallTimeLLM

        outline = load_outline(engine.model)
        setup = self._setup(engine, outline)
        lengths = None if self.output_len is None else parsed_lengths("--output-len", self.output_len)
        llm = WallTimeLLM(
            outline,
            setup.cost,
            policy,
            num_blocks=setup.num_blocks,
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


def _names(options: SimulatedOptions) -> list[str]:
    return [field.name for field in fields(options)]


def _flags(names: list[str]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in names)
