"""``pagedserve simulate``: serve a trace with one policy or several, on a clock instead of a device."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from pagedserve.cli.device_options import DeviceOptions, Setup
from pagedserve.cli.errors import as_bad_input, refuse
from pagedserve.cli.output_options import PANEL, OutputOptions, refuse_unless_folder_open
from pagedserve.cli.policy_options import PolicyOptions, described
from pagedserve.cli.run_options import LimitOptions, RunOptions, SloOptions
from pagedserve.cli.screen import Screen, endings, refusals
from pagedserve.cli.synthetic_options import SyntheticOptions
from pagedserve.cli.trace_options import PANEL as TRACE_PANEL
from pagedserve.cli.trace_options import SOURCE_HELP, TraceOptions
from pagedserve.policy import Limits, Policy

if TYPE_CHECKING:
    from pagedserve.metrics.record import RunRecord
    from pagedserve.metrics.summary import Summary
    from pagedserve.traces.trace import Trace


def simulate(
    source: Annotated[str, Option("--trace", metavar="TRACE", help=SOURCE_HELP, rich_help_panel=TRACE_PANEL)],
    trace_options: TraceOptions,
    synthetic: SyntheticOptions,
    policy_options: PolicyOptions,
    device_options: DeviceOptions,
    limit_options: LimitOptions,
    run: RunOptions,
    slo: SloOptions,
    output: OutputOptions,
    out: Annotated[
        Path | None,
        Option(metavar="DIR", help="Save each run's record in a folder of its policy's name in DIR.",
               rich_help_panel=PANEL),
    ] = None,
    keep_plans: Annotated[
        bool,
        Option("--keep-plans", help="Keep every step's plan in the record.", rich_help_panel=PANEL),
    ] = False,
) -> None:
    """Serve a trace with one policy or several and compare what each does to latency and memory.

    \b
    Examples
      pagedserve simulate --trace sample:azure_shaped_500
      pagedserve simulate --trace sample:azure_shaped_500 --rate 40 --policy mixed --policy prefill_first --plots pictures
      pagedserve simulate --trace conv.csv --first 2000 --policy mixed,allocator=contiguous_max --policy mixed --num-blocks 4096
      pagedserve simulate --trace synthetic --num-prompts 500 --rate 8 --input-len 512 --output-len lognormal:median=128,sigma=1
      pagedserve simulate --trace sample:shared_prefix_200 --device l40s --model qwen3-14b --out runs --json -
    """
