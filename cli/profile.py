"""``pagedserve profile``: measure a model's steps on this device, for the simulator to predict with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

from typer import Option

from pagedserve.cli.engine_options import EngineOptions, tell
from pagedserve.cli.errors import as_bad_input, refuse
from pagedserve.cli.option_kinds import choice, count
from pagedserve.cli.output_options import PANEL, overwriting, refuse_unless_writable
from pagedserve.cli.screen import Screen

if TYPE_CHECKING:
    from pagedserve.engine.profile_grid import Grid
    from pagedserve.metrics.profile import Profile, StepPoint
    from pagedserve.policy import Limits

HELP = """Measure how long a model's steps take on this device; the simulator predicts with them.

Chunks of a prefill, batches of decodes, both together, the host's time between steps, and copies of KV blocks to
host memory and back.

Nothing else should run meanwhile. What does not fit the limits is left out, and said.

\b
Examples:
  pagedserve profile --model smollm2-135m --out smollm2.json
  pagedserve profile --model smollm2-135m --out quick.json --grid small --repeats 3
"""
GRID_PANEL = "Measurement"
GRID_NAMES = ("standard", "small")
NOISY = 0.1  # share of the median above which a spread is worth a word


def profile(
    engine_options: EngineOptions,
    out: Annotated[
        Path, Option("--out", metavar="FILE", help="The profile to write, as JSON.", rich_help_panel=PANEL)
    ],
    grid: Annotated[
        str, choice("How many shapes are measured; small is for trying things out.", GRID_PANEL, *GRID_NAMES)
    ] = "standard",
    repeats: Annotated[
        int, count("Measurements of each shape, one a round, after a round to warm up.", GRID_PANEL)
    ] = 5,
    overwrite: Annotated[bool, overwriting("FILE if it exists")] = False,
) -> None:
    """The command; see ``HELP``."""
    refuse_unless_writable(out, overwrite)
    with as_bad_input():
        engine_options.check()
        if engine_options.tensor_parallel_size > 1:
            refuse(
                f"--tensor-parallel-size is {engine_options.tensor_parallel_size}; a profile is measured on one "
                "rank: leave it out"
            )
        tell([f"loading {engine_options.model}"])
        llm = engine_options.start()
    from pagedserve.engine.profile_grid import GRIDS
    from pagedserve.engine.profiler import profile_engine

    screen, limits, shapes = Screen(), llm.engine.limits, GRIDS[grid]
    try:
        with as_bad_input():
            coverage = _coverage(shapes, limits, repeats)
        screen.lines([*llm.decisions, coverage])
        with screen.progress("measuring") as progress:
            found = profile_engine(
                llm.engine, engine_options.model, shapes, num_repeats=repeats, progress=progress
            )
    finally:
        llm.close()
    with as_bad_input():
        found.save(out)
    screen.lines(["", *_tables(found, shapes), "", _spread(found)])
    screen.lines([*_provenance(found), f"saved in {out} (sha256 {found.sha256()})"])


def _coverage(grid: Grid, limits: Limits, repeats: int) -> str:
    """What will be measured, and how much of the grid will not. ValueError if nothing can be."""
    points, rows = grid.fitting(limits)
    everything = len(grid.points(limits))
    outside = everything - len(points)
    left_out = f" ({outside} of the grid's {everything} do not fit the limits and are left out)"
    return (
        f"measuring {len(points)} steps{left_out if outside else ''}, the host's time "
        f"({', '.join(map(_rows, rows))}) and copies to host memory, {repeats} times each after a warm-up"
    )


def _tables(found: Profile, grid: Grid) -> list[str]:
    """The middle times of all steps but the skewed ones, in ms, and of the host, in us."""
    chunks = {point.shape.chunks[0]: point for point in found.steps if point.kind == "chunk"}
    even: dict[tuple[int, int], StepPoint] = {}
    skewed: dict[tuple[int, int], StepPoint] = {}
    for point in found.steps:
        shape = point.shape
        if point.kind == "decode":
            is_even = shape.decode_context_max * shape.num_decodes == shape.decode_context_sum
            context = shape.decode_context_sum // shape.num_decodes
            (even if is_even else skewed)[shape.num_decodes, context] = point
    mixed = {(p.shape.num_decodes, p.shape.chunks[0][0]): p for p in found.steps if p.kind == "mixed"}
    ratios = [point.p50_ns / even[key].p50_ns for key, point in skewed.items() if key in even]
    lines = ["milliseconds a step (p50)", ""]
    lines += _table("chunk of tokens \\ context", grid.chunk_tokens, grid.chunk_contexts, chunks)
    lines += _table("decode batch \\ context", grid.decode_batches, grid.decode_contexts, even)
    if ratios:
        lines += [
            f"  half of the context in one sequence: {min(ratios):.2f} to {max(ratios):.2f} times that",
            "",
        ]
    title = f"decode batch (context {grid.middle_context}) \\ with a chunk of"
    lines += _table(title, grid.decode_batches, grid.mixed_chunks, mixed)
    host = ", ".join(f"{point.p50_ns / 1e3:,.0f} ({_rows(point.num_rows)})" for point in found.host)
    return [*lines, f"microseconds of the host between two decode steps (p50): {host}", *_swaps(found)]


def _swaps(found: Profile) -> list[str]:
    """The middle times of copies to and from host memory."""
    lines = []
    for direction, words in (("out", "to"), ("in", "from")):
        points = [point for point in found.swaps if point.direction == direction]
        times = ", ".join(f"{point.p50_ns / 1e3:,.0f} ({point.num_blocks})" for point in points)
        if points:
            lines.append(f"microseconds of copying so many KV blocks {words} host memory (p50): {times}")
    return lines


def _table(
    title: str, rows: Sequence[int], columns: Sequence[int], points: dict[tuple[int, int], StepPoint]
) -> list[str]:
    """Aligned lines; rows and columns without any point are left out, single points are dashes."""
    rows = [row for row in rows if any((row, column) in points for column in columns)]
    columns = [column for column in columns if any((row, column) in points for row in rows)]
    if not rows:
        return []
    lines = [f"{title:<42}" + "".join(f"{column:>10}" for column in columns)]
    for row in rows:
        cells = [points.get((row, column)) for column in columns]
        texts = ["–" if cell is None else f"{cell.p50_ns / 1e6:,.2f}" for cell in cells]
        lines.append(f"{row:>42}" + "".join(f"{text:>10}" for text in texts))
    return [*lines, ""]


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _spread(found: Profile) -> str:
    """How far the repeats of a step lie apart, which bounds what a prediction can be worth."""
    shares = [(point.p80_ns - point.p20_ns) / point.p50_ns for point in found.steps]
    says = f"spread of the repeats, (p80 - p20) / p50: {median(shares):.0%} at the median step, "
    says += f"{max(shares):.0%} at the worst"
    if median(shares) > NOISY:
        says += "; the machine was busy: measure again when nothing else runs"
    return says


def _provenance(found: Profile) -> list[str]:
    """Where, on what and by what the times were taken."""
    own = found.provenance
    threads = "1 thread" if own["num_threads"] == 1 else f"{own['num_threads']} threads"
    versions = ", ".join(f"{name} {number}" for name, number in own["versions"].items())
    return [
        f"{own['model']} in {own['dtype']} on {own['device_name']} ({own['device']}), {threads} of "
        f"{own['num_cpus']} CPUs, attention {own['attention']}"
        f"{', decodes as CUDA graphs' if own['has_graphs'] else ''}",
        f"{versions}; {own['date']}",
    ]
