"""Which requests: a trace file, a packaged sample or a synthetic trace, and what is done to it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from pagedserve.cli.errors import refuse
from pagedserve.cli.option_kinds import choice, count, factor, switch
from pagedserve.cli.synthetic_options import SyntheticOptions
from pagedserve.cli.values import real

if TYPE_CHECKING:
    from pagedserve.traces.trace import Trace

PANEL = "Trace (applied in this order)"
SAMPLE_PREFIX = "sample:"
SYNTHETIC = "synthetic"
SCALE = real(0, above=True)
SOURCE_HELP = "A trace file, sample:NAME, or synthetic (then see the options for synthetic traces)."


Format = Annotated[
    str | None,
    Option(
        help="Format of the file; detected if not given. 'pagedserve traces list' shows them.",
        rich_help_panel=PANEL,
    ),
]
IgnoreBlockIds = Annotated[bool, switch("--ignore-block-ids", "Forget which prompts share blocks.", PANEL)]
LengthScale = Annotated[float | None, factor("Multiply prompt and output lengths by S.", PANEL)]


def trace_source(help: str = SOURCE_HELP) -> Any:
    """--trace, where the trace is no argument."""
    return Option("--trace", metavar="TRACE", help=help, rich_help_panel=PANEL)


def mean_rate(help: str) -> Any:
    """--rate, which vLLM's client has another name for."""
    rate = real(0, above=True, infinite=True)
    return Option("--rate", "--request-rate", parser=rate, metavar="R", help=help, rich_help_panel=PANEL)


def prompts_seed(panel: str | None, more: str = "") -> Any:
    """What the token ids of a replay are drawn from; ``more``: what else there is to say of it."""
    return count(f"Draws the prompts' tokens{more}.", panel, low=0)


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """How to read a trace, and the replay options in the order in which they are applied."""

    format: Format = None
    on_error: Annotated[
        str | None,
        choice(
            "A bad row: stop there (raise, the default), or leave it out and count it (drop).",
            PANEL,
            "raise",
            "drop",
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
    first: Annotated[int | None, count("Keep the first N requests.", PANEL)] = None
    ignore_block_ids: IgnoreBlockIds = False
    length_scale: LengthScale = None
    output_length_scale: Annotated[
        float | None, factor("Multiply output lengths by S, whatever --length-scale.", PANEL)
    ] = None
    max_prompt: Annotated[int | None, count("Bound prompts to N tokens.", PANEL)] = None
    max_total: Annotated[int | None, count("Bound prompt plus output to N tokens.", PANEL, low=2)] = None
    over_limit: Annotated[
        str | None,
        choice(
            "What exceeds --max-prompt or --max-total: clip it (the default) or drop it.",
            PANEL,
            "clip",
            "drop",
        ),
    ] = None
    time_scale: Annotated[float | None, factor("Multiply arrival times by S; 2 halves the rate.", PANEL)] = (
        None
    )
    rate: Annotated[
        float | None,
        mean_rate("Scale arrival times to R requests/s on average; inf for a synthetic trace: all at once."),
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
