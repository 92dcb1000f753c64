"""Which traffic a live replay gets: a trace, how many of its requests, how long and how dense."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from typer import Option

from pagedserve.cli.errors import refuse
from pagedserve.cli.option_kinds import count, switch
from pagedserve.cli.run_options import declared_limit
from pagedserve.cli.synthetic_options import SyntheticOptions
from pagedserve.cli.trace_options import (
    PANEL,
    SYNTHETIC,
    Format,
    IgnoreBlockIds,
    LengthScale,
    TraceOptions,
    mean_rate,
    prompts_seed,
    trace_source,
)
from pagedserve.cli.values import real

if TYPE_CHECKING:
    from pagedserve.simulator.cost import CostModel
    from pagedserve.traces.trace import Trace
    from pagedserve.validation.planning import Setting, Traffic

DEFAULT_LOAD = 0.7


@dataclass(frozen=True, slots=True)
class TrafficOptions:
    """A trace on a device much smaller than the one it was recorded on."""

    trace: Annotated[str, trace_source("A trace file or sample:NAME.")] = "sample:azure_shaped_500"
    format: Format = None
    requests: Annotated[int | None, count("Take the first N requests.", PANEL)] = None
    ignore_block_ids: IgnoreBlockIds = False
    rate: Annotated[float | None, mean_rate("Requests/s on average; inf: all at once.")] = None
    load: Annotated[
        float | None,
        Option(
            parser=real(0, above=True),
            metavar="L",
            help="The rate as a share of the capacity that simulation finds; the default is 0.7.",
            rich_help_panel=PANEL,
        ),
    ] = None
    length_scale: LengthScale = None
    fit: Annotated[
        bool,
        switch(
            "--fit",
            "Scale lengths so that the largest request fits the model and the run takes about a minute; "
            "the default without --length-scale.",
            PANEL,
        ),
    ] = False
    max_tokens: Annotated[int | None, declared_limit(PANEL)] = None
    seed: Annotated[int, prompts_seed(PANEL)] = 0

    def __post_init__(self) -> None:
        if self.rate is not None and self.load is not None:
            refuse(f"--rate {self.rate:g} and --load {self.load:g} both set the clock; give one of them")
        if self.fit and self.length_scale is not None:
            refuse(
                f"--fit chooses the scale that --length-scale {self.length_scale:g} gives; give one of them"
            )

    def read(self) -> Trace:
        """The trace as it was recorded, its first requests. Raises ValueError or OSError."""
        if self.trace == SYNTHETIC:
            refuse(
                "--trace synthetic: give a file or sample:NAME; "
                "'pagedserve traces convert' writes a synthetic one to a file"
            )
        options = TraceOptions(
            format=self.format, first=self.requests, ignore_block_ids=self.ignore_block_ids
        )
        return options.load(self.trace, SyntheticOptions())

    def planned(self, trace: Trace, setting: Setting, cost: CostModel) -> Traffic:
        """Lengths and arrivals as asked for. ValueError for what cannot be."""
        from pagedserve.validation.planning import plan_traffic

        return plan_traffic(
            trace,
            setting,
            cost,
            rate=self.rate,
            load=self.load or DEFAULT_LOAD,
            length_scale=self.length_scale,
            fit=self.length_scale is None,
        )


def planned_line(traffic: Traffic) -> str:
    """What will be sent, on one line."""
    found = traffic.trace.describe()
    assert found.prompt is not None
    assert found.output is not None
    rate = "all at once" if found.rate_per_s is None else f"{traffic.rate:.3g} requests/s"
    share = "" if found.rate_per_s is None else f" ({traffic.load:.2f} of the capacity found by simulation)"
    return (
        f"traffic: {len(traffic.trace):,} requests of {traffic.trace.name}, {rate}{share}, lengths x "
        f"{traffic.length_scale:.3g}: prompts mean {found.prompt.mean:,.0f}, outputs mean "
        f"{found.output.mean:,.0f} tokens"
    )
