"""Pictures of runs, in one style: each function takes ``{label: RunRecord}`` and returns a Figure.

The plotting stack is imported when the first picture is drawn, so that measuring costs nothing of it.
The figures belong to nobody's global state: save them with ``figure.savefig(path)``, or make one the last
expression of a notebook cell. Colours keep apart for colour-blind readers; a label keeps its colour.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedserve.metrics.compare import POLICY_COLUMNS, Shown, policy_table
from pagedserve.metrics.figures import FAINT, binned_mean, draw_over_time, figure_of, title
from pagedserve.metrics.record import RunRecord
from pagedserve.metrics.summary import block_size, num_blocks
from pagedserve.metrics.timeline import Timeline
from pagedserve.metrics.tokens import inter_token_s, request_times, token_times

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUM_BINS = 240  # time bins of a long run: more than the pixels of a line's bends, few enough to be smooth
NUM_ECDF_POINTS = 1000
PERCENTILES = (0.5, 0.9, 0.99, 0.999)
LABEL_CHARS = 28  # beside bars before wrapping


def latency_distributions(records: Mapping[str, RunRecord]) -> Figure:
    """TTFT per request and ITL per gap: cumulative distributions over logarithmic time.

    Above the median the share is stretched, so that p90, p99 and p99.9 can be read.
    """
    with figure_of(records, 1, 2, 3.9) as (figure, axes, looks):
        left, right = axes[0]
        for label, record in records.items():
            tokens = token_times(record)
            _draw_ecdf(left, request_times(record, tokens).ttft_s, looks[label])
            _draw_ecdf(right, inter_token_s(tokens) * 1e3, looks[label])
        for panel, unit, share in (
            (left, "seconds", "share of requests"),
            (right, "milliseconds", "share of gaps"),
        ):
            _finish_ecdf(panel, unit, share)
        title(left, "Time to first token", "left is better")
        title(right, "Time between tokens", "left is better")
    return figure


def memory_over_time(records: Mapping[str, RunRecord], num_bins: int = NUM_BINS) -> Figure:
    """KV occupancy (blocks used, where a pool has no limit) and the waste within used blocks over time."""
    limited = all(record.is_client or num_blocks(record) is not None for record in records.values())

    def occupancy(record: RunRecord, timeline: Timeline, edges: np.ndarray) -> np.ndarray:
        scale = 100 / (num_blocks(record) or 1) if limited else 1.0
        return scale * binned_mean(record, timeline, edges, "num_blocks_used")

    def waste(record: RunRecord, timeline: Timeline, edges: np.ndarray) -> np.ndarray:
        slots = timeline.binned(record.array_or_nan("steps", "num_blocks_used") * block_size(record), edges)
        wasted = timeline.binned(record.array_or_nan("steps", "num_wasted_slots"), edges)
        # Nothing allocated, nothing wasted: leave a gap in the line.
        return 100 * np.divide(wasted, slots, out=np.full_like(slots, np.nan), where=slots > 0)

    with figure_of(records, 2, 1, 4.8, sharex=True) as (figure, axes, looks):
        upper, lower = axes[:, 0]
        draw_over_time((upper, lower), records, looks, (occupancy, waste), num_bins)
        upper.set(ylabel="% of blocks" if limited else "blocks", ylim=(0, 102 if limited else None))
        lower.set(ylabel="% of slots in use", ylim=(0, max(5.0, lower.get_ylim()[1])))
        title(upper, "KV cache in use")
        title(lower, "KV slots reserved but empty", "lower is better")
    return figure


def load_over_time(records: Mapping[str, RunRecord], num_bins: int = NUM_BINS) -> Figure:
    """Requests running and requests waiting over time."""

    with figure_of(records, 2, 1, 4.8, sharex=True) as (figure, axes, looks):
        upper, lower = axes[:, 0]
        draw_over_time((upper, lower), records, looks, (requests_running, requests_waiting), num_bins)
        for panel in (upper, lower):
            panel.set(ylabel="requests", ylim=(0, None))
        title(upper, "Requests running")
        title(lower, "Requests waiting", "lower is better")
    return figure


def requests_running(record: RunRecord, timeline: Timeline, edges: np.ndarray) -> np.ndarray:
    """The mean number of requests running between each two of ``edges`` (ns)."""
    return binned_mean(record, timeline, edges, "num_running")


def requests_waiting(record: RunRecord, timeline: Timeline, edges: np.ndarray) -> np.ndarray:
    """The mean number of requests waiting between each two of ``edges`` (ns)."""
    return binned_mean(record, timeline, edges, "num_waiting")


def policies_compared(records: Mapping[str, RunRecord]) -> Figure:
    """One small bar chart per metric of ``compare.POLICY_COLUMNS``, one bar a run."""
    table = policy_table(records)
    labels = list(records)
    num_columns = 3
    num_rows = math.ceil(len(POLICY_COLUMNS) / num_columns)
    names = [_wrapped(label) for label in labels]
    bar_in = max(0.27, 0.06 + 0.15 * max((name.count("\n") + 1 for name in names), default=1))
    height = num_rows * (0.85 + bar_in * len(labels))
    with figure_of(records, num_rows, num_columns, height, legend=False) as (figure, axes, looks):
        for panel, shown in zip(axes.flat, POLICY_COLUMNS, strict=False):
            _draw_bars(panel, shown, [table.loc[label, shown.metric] for label in labels], looks)
        for panel in axes[:, 0]:
            panel.set_yticks(range(len(labels)), names)
    return figure


def _wrapped(label: str) -> str:
    """The label on lines of ``LABEL_CHARS`` characters, broken behind a comma, slash or space where it can be."""
    lines = [""]
    for part in re.findall(r"[^,/ ]*[,/ ]|[^,/ ]+", label):
        if lines[-1] and len(lines[-1] + part.rstrip()) > LABEL_CHARS:
            lines.append("")
        lines[-1] += part
        while len(lines[-1].rstrip()) > LABEL_CHARS:
            lines[-1:] = [lines[-1][:LABEL_CHARS], lines[-1][LABEL_CHARS:]]
    return "\n".join(line.rstrip() for line in lines)


def _draw_ecdf(axes: Axes, values: np.ndarray, look: dict[str, Any]) -> None:
    present = np.sort(values[~np.isnan(values)])
    if not present.size:
        return
    rank = np.arange(1, present.size + 1)
    if present.size > NUM_ECDF_POINTS:
        # Half evenly, half crowding towards the tail, whose few points carry p99 and the maximum.
        even = np.linspace(0, present.size - 1, NUM_ECDF_POINTS // 2)
        tail = present.size - np.geomspace(1, present.size, NUM_ECDF_POINTS // 2)
        rank = np.unique(np.concatenate((even, tail)).astype(np.int64)) + 1
    x = present[rank - 1]
    axes.step(np.append(x[0], x), np.append(0, rank / present.size), where="post", **look)


def _finish_ecdf(axes: Axes, unit: str, share: str) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    curves = [np.asarray(line.get_xydata()) for line in axes.get_lines()] or [np.ones((2, 2))]
    # The top lies half a point short of the last one: nobody reads p99.9 off a hundred requests.
    top = min(1 - 0.5 / max(len(curve) for curve in curves), 0.9995)
    left = min(curve[0, 0] for curve in curves)
    right = max(curve[np.searchsorted(curve[:, 1], top), 0] for curve in curves)
    if left > 0:
        axes.set_xscale("log")
        axes.set_xlim(left / 1.1, right * 1.2)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if right < 300 * left else (1,)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yscale("function", functions=(_stretch, _unstretch))
    levels = [level for level in PERCENTILES if level < top]
    axes.set_yticks([0, *levels], ["0", *(f"p{100 * level:g}" for level in levels)])
    axes.set(xlabel=unit, ylabel=share, ylim=(0, top))


def _stretch(share: np.ndarray) -> np.ndarray:
    """Even up to the median; above it one unit of height for each further nine of p90, p99, p99.9."""
    return np.where(share < 0.5, 1.6 * share, 0.8 + np.log10(0.5 / np.maximum(1 - share, 1e-6)))


def _unstretch(height: np.ndarray) -> np.ndarray:
    return np.where(height < 0.8, height / 1.6, 1 - 0.5 * 10.0 ** (0.8 - height))


def _draw_bars(
    axes: Axes, shown: Shown, values: Sequence[float], looks: Mapping[str, dict[str, Any]]
) -> None:
    scaled = [0.0 if math.isnan(value) else value * shown.scale for value in values]
    axes.barh(range(len(values)), scaled, color=[look["color"] for look in looks.values()], height=0.7)
    for place, (value, width) in enumerate(zip(values, scaled, strict=True)):
        text = shown.text(value)
        axes.annotate(text, (width, place), (4, 0), textcoords="offset points", va="center", fontsize=9)
    title(axes, shown.heading)
    # Below the bars: beside the title there is no room once labels are long.
    hint = f"{shown.better} is better" if shown.better else ""
    axes.set_xlabel(hint, loc="left", fontsize=8.5, color=FAINT, labelpad=3)
    axes.set(xticks=[], yticks=[], xlim=(0, 1.25 * max(scaled, default=0) or 1.0))
    axes.grid(False)
    axes.invert_yaxis()
    axes.spines["bottom"].set_visible(False)
