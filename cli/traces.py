"""``pagedserve traces``: look at traces, change them, and see which formats and samples there are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Typer

from pagedserve.cli.errors import OneLineGroup, as_bad_input
from pagedserve.cli.option_groups import grouped
from pagedserve.cli.output_options import ResultOptions, overwriting, refuse_unless_writable, replacing
from pagedserve.cli.screen import Screen
from pagedserve.cli.synthetic_options import SyntheticOptions
from pagedserve.cli.trace_options import SOURCE_HELP, TraceOptions

INFO_HELP = """Show what a trace is like, and what reading it did to its rows.

Options that change a trace show what it would become.

\b
Examples:
  pagedserve traces info conv.csv
  pagedserve traces info conversation_trace.jsonl.gz --format mooncake --on-error drop
  pagedserve traces info sample:azure_shaped_500 --rate 20 --first 100
"""
CONVERT_HELP = """Read or make a trace, change it, and write it in PagedServe's own CSV format.

OUT is gzip-compressed if its name ends in .gz.

\b
Examples:
  pagedserve traces convert conv.csv conv.native.csv.gz
  pagedserve traces convert conv.csv busy.csv --window 600:1200 --rate 20 --max-prompt 4096
  pagedserve traces convert synthetic even.csv --num-prompts 100 --rate 5 --burstiness inf \\
      --input-len uniform:100:2000 --output-len 128
"""
traces = Typer(
    name="traces",
    cls=OneLineGroup,
    help="Look at request traces and convert them.",
    add_completion=False,
)


def info(
    source: Annotated[str, Argument(metavar="TRACE", help=SOURCE_HELP)],
    trace_options: TraceOptions,
    synthetic: SyntheticOptions,
    results: ResultOptions,
) -> None:
    """The command; see ``INFO_HELP``."""
    results.check()
    with as_bad_input():
        trace = trace_options.load(source, synthetic)
    summary, sha256 = trace.describe(), trace.sha256()
    Screen(results.is_quiet).lines([*trace.report.lines(), *summary.lines(), f"sha256    {sha256}"])
    results.write(
        {
            "name": trace.name,
            "sha256": sha256,
            "report": trace.report.as_dict(),
            "summary": summary.as_dict(),
        }
    )


def convert(
    source: Annotated[str, Argument(metavar="TRACE", help=SOURCE_HELP)],
    out: Annotated[Path, Argument(metavar="OUT", help="The file to write.")],
    trace_options: TraceOptions,
    synthetic: SyntheticOptions,
    overwrite: Annotated[bool, overwriting("OUT if it exists")] = False,
) -> None:
    """The command; see ``CONVERT_HELP``."""
    from pagedserve.traces.readers import write_trace

    refuse_unless_writable(out, overwrite)
    with as_bad_input():
        trace = trace_options.load(source, synthetic)
        with replacing(out) as fresh:
            write_trace(trace, fresh)
    Screen().lines([*trace.report.lines(), f"{len(trace):,} requests written to {out}"])


def list_traces(results: ResultOptions) -> None:
    """Show the formats that can be read and the samples that come with the package."""
    from pagedserve.traces.readers import trace_formats
    from pagedserve.traces.sample_files import sample, sample_names

    results.check()
    formats = {known.name: known.description for known in trace_formats()}
    samples = {name: sample(name).describe() for name in sample_names()}
    screen = Screen(results.is_quiet)
    screen.lines(["formats (--format; detected if not given)"])
    screen.lines(f"  {name:<18} {description}" for name, description in formats.items())
    screen.lines(["samples (sample:NAME; synthetic, no production traffic)"])
    screen.lines(
        f"  {name:<18} {found.num_requests} requests at {found.rate_per_s or 0:.3g}/s"
        for name, found in samples.items()
    )
    screen.lines(["synthetic traces: see pagedserve simulate --help"])
    results.write({"formats": formats, "samples": {name: found.as_dict() for name, found in samples.items()}})


traces.command("info", help=INFO_HELP)(grouped(info))
traces.command("convert", help=CONVERT_HELP)(grouped(convert))
traces.command("list")(grouped(list_traces))
