"""How every picture looks: one style, one grid of axes, lines over time.

The plotting stack is imported when the first picture is drawn, so that measuring costs nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedserve.metrics.record import RunRecord
from pagedserve.metrics.timeline import Timeline, step_timeline
from pagedserve.metrics.tokens import NS_PER_S

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN = 9.0  # about the width of a README: type stays readable without zooming
LEGEND_CHARS = 105  # in a row of a legend, marks included
INK, FAINT = "#3a3f45", "#868d94"
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1)))  # the palette has ten colours: each further ten get a dash
STYLE: dict[Any, Any] = {
    "figure.dpi": 150,
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9.5,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#c8ccd0",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "grid.color": "#e8eaec",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
}


@contextmanager
def figure_of(
    labels: Mapping[str, RunRecord],
    num_rows: int,
    num_columns: int,
    height_in: float,
    *,
    legend: bool = True,
    **subplots: Any,
) -> Iterator[tuple[Figure, np.ndarray, dict[str, Any]]]:
    """The one door to the plotting stack: a styled grid of axes, one look a label, the legend on top."""
    import matplotlib.pyplot as plt
    import seaborn as sns
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.lines import Line2D

    if not labels:
        raise ValueError("no records to draw: expected at least one label with its record")
    colours = sns.color_palette("colorblind", len(labels))
    # Later lines are thinner: where runs agree, live and simulated say, the earlier one shows beneath.
    widths = np.linspace(2.6, 1.2, len(labels)) if len(labels) > 1 else (1.6,)
    looks = {
        label: {"color": colours[i], "linewidth": widths[i], "linestyle": DASHES[i // 10 % len(DASHES)]}
        for i, label in enumerate(labels)
    }
    with sns.axes_style("whitegrid"), plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            num_rows,
            num_columns,
            figsize=(WIDTH_IN, height_in),
            layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.06),
            squeeze=False,
            **subplots,
        )
        # pyplot registers notebook display; closed, the figure is shown once, where its owner wants it.
        plt.close(figure)
        yield figure, axes, looks
        if legend and len(labels) > 1:
            handles = [Line2D([], [], **{**look, "linewidth": 3}) for look in looks.values()]
            figure.legend(handles, list(labels), loc="outside upper left", ncols=_num_columns(list(labels)))


def _num_columns(labels: list[str]) -> int:
    """As many columns as the width has room for, each as wide as its longest label."""
    for count in range(min(4, len(labels)), 1, -1):
        columns = np.array_split(np.array(labels, object), count)
        if sum(max(map(len, column)) + 8 for column in columns) <= LEGEND_CHARS:
            return count
    return 1


def title(axes: Axes, what: str, better: str = "") -> None:
    axes.set_title(what)
    axes.set_title(better, loc="right", fontsize=8.5, fontweight="normal", color=FAINT)


def draw_over_time(
    panels: Sequence[Axes],
    records: Mapping[str, RunRecord],
    looks: Mapping[str, dict[str, Any]],
    quantities: Sequence[Callable[[RunRecord, Timeline, np.ndarray], np.ndarray]],
    num_bins: int,
) -> None:
    timelines = {label: step_timeline(record) for label, record in records.items()}
    longest = max(timeline.duration_s for timeline in timelines.values())
    unit, per_unit = _time_unit(longest)
    for label, record in records.items():
        timeline = timelines[label]
        edges = timeline.edges(num_bins)
        centres = (edges[:-1] + np.diff(edges) / 2 - edges[0]) / NS_PER_S / per_unit
        for panel, quantity in zip(panels, quantities, strict=True):
            values = quantity(record, timeline, edges)
            panel.plot(centres, values, **looks[label])
            if len(records) == 1:
                panel.fill_between(centres, values, color=looks[label]["color"], alpha=0.15, linewidth=0)
    panels[-1].set(xlabel=f"{unit} since the first step", xlim=(0, longest / per_unit or 1.0))


def binned_mean(record: RunRecord, timeline: Timeline, edges: np.ndarray, name: str) -> np.ndarray:
    seconds = np.diff(edges) / NS_PER_S
    total = timeline.binned(record.array_or_nan("steps", name), edges)
    return np.divide(total, seconds, out=np.full_like(total, np.nan), where=seconds > 0)


def _time_unit(longest_s: float) -> tuple[str, float]:
    if longest_s < 10 * 60:
        return "seconds", 1.0
    return ("minutes", 60.0) if longest_s < 5 * 3600 else ("hours", 3600.0)
