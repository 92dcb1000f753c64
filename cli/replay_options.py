"""Which traffic a live replay gets: a trace, how many of its requests, how long and how dense."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from typer import Option

from pagedserve.cli.errors import refuse
from pagedserve.cli.synthetic_options import SyntheticOptions
from pagedserve.cli.trace_options import PANEL, SCALE, SYNTHETIC, TraceOptions
from pagedserve.cli.values import real, whole

if TYPE_CHECKING:
    from pagedserve.simulator.cost import CostModel
    from pagedserve.traces.trace import Trace
    from pagedserve.validation.planning import Setting, Traffic

SOURCE_HELP = "A trace file or sample:NAME."
DEFAULT_LOAD = 0.7


@dataclass(frozen=True, slots=True)
class TrafficOptions:
    """A trace on a device much smaller than the one it was recorded on."""

    trace: Annotated[str, Option("--trace", metavar="TRACE", help=SOURCE_HELP, rich_help_panel=PANEL)] = (
        "sample:azure_shaped_500"
    )
    format: Annotated[
        str | None,
        Option(
            help="Format of the file; detected if not given. 'pagedserve traces list' shows them.",
            rich_help_panel=PANEL,
        ),
    ] = None
    requests: Annotated[
        int | None,
        Option(parser=whole(1), metavar="N", help="Take the first N requests.", rich_help_panel=PANEL),
    ] = None
    ignore_block_ids: Annotated[
        bool, Option("--ignore-block-ids", help="Forget which prompts share blocks.", rich_help_panel=PANEL)
    ] = False
    rate: Annotated[
        float | None,
        Option(
            "--rate",
            "--request-rate",
            parser=real(0, above=True, infinite=True),
            metavar="R",
            help="Requests/s on average; inf: all at once.",
            rich_help_panel=PANEL,
        ),
    ] = None
    load: Annotated[
        float | None,
        Option(
            parser=real(0, above=True),
            metavar="L",
            help="The rate as a share of the capacity that simulation finds; the default is 0.7.",
            rich_help_panel=PANEL,
        ),
    ] = None
    length_scale: Annotated[
        float | None,
        Option(
            parser=SCALE, metavar="S", help="Multiply prompt and output lengths by S.", rich_help_panel=PANEL
        ),
    ] = None
    fit: Annotated[
        bool,
        Option(
            "--fit",
            help="Scale lengths so that the largest request fits the model and the run takes about a minute; "
            "the default without --length-scale.",
            rich_help_panel=PANEL,
        ),
    ] = False
    max_tokens: Annotated[
        int | None,
        Option(
            parser=whole(1),
            metavar="N",
            help="The output limit every request declares; default: the trace's longest output.",
            rich_help_panel=PANEL,
        ),
    ] = None
    seed: Annotated[
        int, Option(parser=whole(0), metavar="N", help="Draws the prompts' tokens.", rich_help_panel=PANEL)
    ] = 0

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
