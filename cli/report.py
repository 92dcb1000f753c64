"""``pagedserve report``: tables and pictures of runs that were recorded, simulated or live."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from pagedserve.cli.errors import as_bad_input, refuse
from pagedserve.cli.output_options import PANEL, PICTURES, ResultOptions, draw, refuse_unless_drawable
from pagedserve.cli.run_options import SloOptions
from pagedserve.cli.screen import Screen, endings, refusals

if TYPE_CHECKING:
    from pagedserve.metrics.record import RunRecord

HELP = """Show one run or compare several: a table, how requests ended, and pictures if asked for.

A folder is a record, or holds records in its sub-folders, as the --out of simulate does.

\b
Examples:
  pagedserve report runs
  pagedserve report runs/mixed runs/prefill_first --plots pictures
  pagedserve report runs --slo-ttft 1 --slo-tpot 0.05 --json results.json
"""
HEADER = "header.json"
COMPARED = ("kind", "trace", "limits", "cost", "device", "overlap_depth")


def report(
    folders: Annotated[list[Path], Argument(metavar="DIR...", help="Records, or folders of records.")],
    slo: SloOptions,
    results: ResultOptions,
    plots: Annotated[
        Path | None,
        Option(metavar="DIR", help=f"Draw {', '.join(PICTURES)} into this folder.", rich_help_panel=PANEL),
    ] = None,
) -> None:
    """The command; see ``HELP``."""
    from pagedserve.metrics.record import RunRecord
    from pagedserve.metrics.summary import Slo, summarize

    results.check(writes_more=plots is not None)
    if plots is not None:
        refuse_unless_drawable(plots, results.overwrite)
    bounds = slo.bounds()
    goal = Slo(**bounds) if bounds else None
    with as_bad_input():
        places = _labelled(_record_folders(folders))
        records = {label: RunRecord.load(folder) for label, folder in places.items()}
        summaries = {label: summarize(record, goal) for label, record in records.items()}
    screen = Screen(results.is_quiet)
    for label, record in records.items():
        screen.lines([f"{label}: {_described(record)}"])
        screen.lines(endings(label, record, summaries[label]))
    screen.lines(_differences(records))
    screen.table(summaries)
    if plots is not None:
        screen.lines(f"drawn: {file}" for file in draw(records, plots))
    runs = {
        label: {
            "metrics": summaries[label].as_dict(),
            "refusals": refusals(record),
            "header": record.header,
            "record": str(places[label]),
        }
        for label, record in records.items()
    }
    results.write({"runs": runs})


def _record_folders(folders: list[Path]) -> list[Path]:
    """The folders given, each one that holds records replaced by those."""
    found: list[Path] = []
    for folder in folders:
        inside = (
            [] if (folder / HEADER).exists() else sorted(path.parent for path in folder.glob(f"*/{HEADER}"))
        )
        found += inside or [folder]
    for folder in found:
        if found.count(folder) > 1:
            refuse(f"{folder}: given twice; give each record once")
    return found


def _labelled(folders: list[Path]) -> dict[str, Path]:
    """Each folder under its own name, or its whole path where two have the same name."""
    names = [folder.resolve().name for folder in folders]
    return {
        name if names.count(name) == 1 else str(folder): folder
        for name, folder in zip(names, folders, strict=True)
    }


def _described(record: RunRecord) -> str:
    header = record.header
    policy = header["policy"].get("name") or "unnamed policy"
    device = (header["device"] or {}).get("name")
    title = device.get("title") if isinstance(device, dict) else device
    where = f" on {title}" if title else ""
    trace = header["trace"].get("name", "an unnamed trace")
    if record.is_client:
        return f"seen by a client, trace {trace}, {record.steps.num_rows:,} arrivals of tokens"
    return f"{header['kind']}{where}, policy {policy}, trace {trace}, {record.steps.num_rows:,} steps"


def _differences(records: Mapping[str, RunRecord]) -> list[str]:
    """A warning if the runs differ in more than their policy."""
    first, *others = (record.header for record in records.values())
    differing = [
        key for key in COMPARED if any(_of_run(other, key) != _of_run(first, key) for other in others)
    ]
    return [f"note: these runs differ in {', '.join(differing)}, not only in policy"] if differing else []


def _of_run(header: Mapping[str, Any], key: str) -> Any:
    """A header's value, of the trace only what a run can see."""
    value = header[key]
    return value.get("sha256", value) if key == "trace" else value
