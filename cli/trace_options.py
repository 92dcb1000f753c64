"""Which requests: a trace file, a packaged sample or a synthetic trace, and what is done to it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from pagedserve.cli.errors import refuse
from pagedserve.cli.synthetic_options import SyntheticOptions
from pagedserve.cli.values import one_of, real, whole

if TYPE_CHECKING:
    from pagedserve.traces.trace import Trace

PANEL = "Trace (applied in this order)"
SAMPLE_PREFIX = "sample:"
SYNTHETIC = "synthetic"
SCALE = real(0, above=True)
SOURCE_HELP = "A trace file, sample:NAME, or synthetic (then see the options for synthetic traces)."


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """How to read a trace, and the replay options in the order in which they are applied."""

    format: Annotated[
        str | None,
        Option(
            help="Format of the file; detected if not given. 'pagedserve traces list' shows them.",
            rich_help_panel=PANEL,
        ),
    ] = None
    on_error: Annotated[
        str | None,
        Option(
            parser=one_of("raise", "drop"),
            metavar="raise|drop",
            help="A bad row: stop there (raise, the default), or leave it out and count it (drop).",
            rich_help_panel=PANEL,
        ),
    ] = None
    window: Annotated[
        str | None,
        Option(
            metavar="A:B",
            help="Keep arrivals from A to before B seconds, the first moved to 0; 60: has no end.",
            rich_help_panel=PANEL,
        ),
    ] = None
    first: Annotated[
        int | None,
        Option(parser=whole(1), metavar="N", help="Keep the first N requests.", rich_help_panel=PANEL),
    ] = None
    ignore_block_ids: Annotated[
        bool, Option("--ignore-block-ids", help="Forget which prompts share blocks.", rich_help_panel=PANEL)
    ] = False
    length_scale: Annotated[
        float | None,
        Option(
            parser=SCALE, metavar="S", help="Multiply prompt and output lengths by S.", rich_help_panel=PANEL
        ),
    ] = None
    output_length_scale: Annotated[
        float | None,
        Option(
            parser=SCALE,
            metavar="S",
            help="Multiply output lengths by S, whatever --length-scale.",
            rich_help_panel=PANEL,
        ),
    ] = None
    max_prompt: Annotated[
        int | None,
        Option(parser=whole(1), metavar="N", help="Bound prompts to N tokens.", rich_help_panel=PANEL),
    ] = None
    max_total: Annotated[
        int | None,
        Option(
            parser=whole(2), metavar="N", help="Bound prompt plus output to N tokens.", rich_help_panel=PANEL
        ),
    ] = None
    over_limit: Annotated[
        str | None,
        Option(
            parser=one_of("clip", "drop"),
            metavar="clip|drop",
            help="What exceeds --max-prompt or --max-total: clip it (the default) or drop it.",
            rich_help_panel=PANEL,
        ),
    ] = None
    time_scale: Annotated[
        float | None,
        Option(
            parser=SCALE,
            metavar="S",
            help="Multiply arrival times by S; 2 halves the rate.",
            rich_help_panel=PANEL,
        ),
    ] = None
    rate: Annotated[
        float | None,
        Option(
            "--rate",
            "--request-rate",
            parser=real(0, above=True, infinite=True),
            metavar="R",
            help="Scale arrival times to R requests/s on average; inf for a synthetic trace: all at once.",
            rich_help_panel=PANEL,
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.rate is not None and self.time_scale is not None:
            refuse(f"--rate {self.rate:g} and --time-scale {self.time_scale:g} both set the clock; give one")
        if self.over_limit is not None and self.max_prompt is None and self.max_total is None:
            refuse(f"--over-limit {self.over_limit} has no limit; give --max-prompt or --max-total as well")

    def load(self, source: str, synthetic: SyntheticOptions) -> Trace:
        """Read or make the trace and apply the options. Raises ValueError or OSError for what is wrong."""
        if source == SYNTHETIC:
            if self.format is not None or self.on_error is not None:
                refuse("--format and --on-error are about reading a file; a synthetic trace is not read")
            trace, rate = synthetic.make(self.rate), None
        else:
            synthetic.refuse_any(source)
            trace, rate = self._read(source), self.rate
        trace = self._changed(trace, rate)
        if not len(trace):
            lost = "; ".join(f"{each.count} {each.kind}: {each.reason}" for each in trace.report.tallies)
            refuse(f"no request is left of {source} ({lost or 'it has no rows'}); choose other options")
        return trace

    def _read(self, source: str) -> Trace:
        from pagedserve.traces.readers import read_trace
        from pagedserve.traces.sample_files import sample

        if source.startswith(SAMPLE_PREFIX):
            if self.format is not None or self.on_error is not None:
                refuse(f"--format and --on-error are about a file of yours; {source} has no use for them")
            return sample(source.removeprefix(SAMPLE_PREFIX))
        path = Path(source)
        if not path.is_file():
            found = "a folder" if path.is_dir() else "nothing there"
            refuse(f"{source}: {found}; give a trace file, sample:NAME or synthetic")
        on_error: Any = self.on_error or "raise"
        return read_trace(path, self.format, on_error)

    def _changed(self, trace: Trace, rate: float | None) -> Trace:
        from pagedserve.traces import transforms

        if self.window is not None:
            trace = transforms.rebase(transforms.window(trace, *_interval(self.window)))
        if self.first is not None:
            trace = transforms.first(trace, self.first)
        if self.ignore_block_ids:
            trace = transforms.without_block_ids(trace)
        if self.length_scale is not None or self.output_length_scale is not None:
            factor = 1.0 if self.length_scale is None else self.length_scale
            trace = transforms.scale_lengths(trace, factor, output_factor=self.output_length_scale)
        if self.max_prompt is not None or self.max_total is not None:
            mode: Any = self.over_limit or "clip"
            trace = transforms.clip_lengths(trace, self.max_prompt, self.max_total, mode)
        if self.time_scale is not None:
            trace = transforms.scale_time(trace, self.time_scale)
        return trace if rate is None else transforms.with_rate(trace, rate)


def _interval(text: str) -> tuple[float, float | None]:
    """ "A:B" in seconds; either side may be left out."""
    start, colon, end = text.partition(":")
    try:
        if not colon:
            raise ValueError
        found = float(start or 0), float(end) if end else None
    except ValueError:
        refuse(f"--window is {text!r}; write A:B in seconds, such as 0:600 or 60:")
    if not all(math.isfinite(side) for side in found if side is not None):
        refuse(f"--window is {text!r}; both ends must be finite (leave B out for the end)")
    return found
