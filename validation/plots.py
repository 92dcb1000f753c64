"""Pictures of a prediction beside what came of it; in the style of `pagedserve.metrics.plots`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedserve.metrics.compare import POLICY_COLUMNS, Shown, policy_table
from pagedserve.metrics.figures import FAINT, draw_over_time, figure_of, title
from pagedserve.metrics.plots import NUM_BINS, latency_distributions, requests_running, requests_waiting
from pagedserve.metrics.record import RunRecord
from pagedserve.metrics.tokens import request_times, token_times

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LIVE, SIMULATED = "live", "simulated"


def predicted_against_live(live: Sequence[RunRecord], simulated: RunRecord) -> Figure:
    """One dot a request: TTFT, mean time between tokens and latency, live across, simulated up.

    On the diagonal the prediction was right. Of several live runs each request's median is shown.
    """
    runs = {LIVE: live[0], SIMULATED: simulated}
    with figure_of(runs, 1, 3, 3.6, legend=False) as (figure, axes, looks):
        predicted, observed = _per_request(simulated), [_per_request(record) for record in live]
        for panel, name in zip(axes[0], predicted, strict=True):
            across = np.median([run[name] for run in observed], axis=0)
            _dots(panel, across, predicted[name], looks[SIMULATED]["color"])
            title(panel, name)
        axes[0, 0].set_ylabel("simulated")
    return figure


def distributions(live: Sequence[RunRecord], simulated: RunRecord) -> Figure:
    """The distributions of TTFT and of the time between tokens, every live run under the simulated one."""
    return latency_distributions(_labelled(live, simulated))


def timelines(live: RunRecord, simulated: RunRecord, num_bins: int = NUM_BINS) -> Figure:
    """Requests running and waiting over time: the live run above, the simulated one below, same axes."""
    records = {LIVE: live, SIMULATED: simulated}
    with figure_of(records, 4, 1, 7.2, legend=False, sharex=True) as (figure, axes, looks):
        for row, (label, record) in enumerate(records.items()):
            upper, lower = axes[2 * row, 0], axes[2 * row + 1, 0]
            draw_over_time(
                (upper, lower), {label: record}, looks, (requests_running, requests_waiting), num_bins
            )
            title(upper, f"Requests running, {label}")
            title(lower, f"Requests waiting, {label}")
        longest = max(panel.get_xlim()[1] for panel in axes[:, 0])
        for kind in (0, 1):
            panels = (axes[kind, 0], axes[kind + 2, 0])
            highest = max(panel.get_ylim()[1] for panel in panels)
            for panel in panels:
                panel.set(ylim=(0, highest), xlim=(0, longest), ylabel="requests")
        axes[1, 0].set_xlabel("")
    return figure


def policies_foretold(runs: Mapping[str, tuple[RunRecord, RunRecord]]) -> Figure:
    """``{label: (live, simulated)}``: one small chart per metric, a pair of bars for each label."""
    labels = list(runs)
    records = {LIVE: runs[labels[0]][0], SIMULATED: runs[labels[0]][1]}
    tables = [policy_table({label: pair[kind] for label, pair in runs.items()}) for kind in (0, 1)]
    num_rows = math.ceil(len(POLICY_COLUMNS) / 3)
    with figure_of(records, num_rows, 3, num_rows * (0.85 + 0.44 * len(labels))) as (figure, axes, looks):
        for panel, shown in zip(axes.flat, POLICY_COLUMNS, strict=False):
            for table, offset, look in zip(tables, (-0.2, 0.2), looks.values(), strict=True):
                _bars(panel, shown, [float(table.at[label, shown.metric]) for label in labels], offset, look)
            panel.set(xticks=[], yticks=[], xlim=(0, 1.25 * panel.get_xlim()[1]))
            panel.set_xlabel(
                f"{shown.better} is better" if shown.better else "", loc="left", fontsize=8.5, color=FAINT
            )
            panel.grid(False)
            panel.invert_yaxis()
            panel.spines["bottom"].set_visible(False)
            title(panel, shown.heading)
        for panel in axes[:, 0]:
            panel.set_yticks(range(len(labels)), labels)
    return figure


def _bars(panel: Axes, shown: Shown, values: Sequence[float], offset: float, look: Mapping[str, Any]) -> None:
    widths = [0.0 if math.isnan(value) else value * shown.scale for value in values]
    places = [place + offset for place in range(len(values))]
    panel.barh(places, widths, height=0.36, color=look["color"])
    for place, value, width in zip(places, values, widths, strict=True):
        panel.annotate(
            shown.text(value), (width, place), (3, 0), textcoords="offset points", va="center", fontsize=8
        )


def _labelled(live: Sequence[RunRecord], simulated: RunRecord) -> Mapping[str, RunRecord]:
    many = len(live) > 1
    runs = {f"{LIVE} {number}" if many else LIVE: record for number, record in enumerate(live, 1)}
    return {**runs, SIMULATED: simulated}


def _per_request(record: RunRecord) -> dict[str, np.ndarray]:
    """Seconds or milliseconds of every request, in the order of their ids; NaN where there was none."""
    tokens = token_times(record)
    times = request_times(record, tokens)
    order = np.argsort(record.array("requests", "request"))
    return {
        "TTFT (s)": times.ttft_s[order],
        "time per output token (ms)": 1e3 * times.tpot_s[order],
        "latency (s)": times.e2e_s[order],
    }


def _dots(panel: Axes, across: np.ndarray, up: np.ndarray, color: object) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    known = ~np.isnan(across) & ~np.isnan(up) & (across > 0) & (up > 0)
    panel.set(xlabel="live", xscale="log", yscale="log", aspect="equal")
    if not known.any():
        return
    both = np.concatenate((across[known], up[known]))
    low, high = both.min() / 1.2, both.max() * 1.2
    panel.plot([low, high], [low, high], color="#868d94", linewidth=1, zorder=1)
    panel.scatter(across[known], up[known], s=14, color=color, alpha=0.6, linewidths=0, zorder=2)
    panel.set(xlim=(low, high), ylim=(low, high))
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 30 * low else (1,)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
