import subprocess
import sys
from collections.abc import Callable
from io import BytesIO
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from metrics_hand_records import MS, hand_record
from metrics_toy_runs import toy_record

from pagedserve.metrics import plots
from pagedserve.metrics.compare import POLICY_COLUMNS
from pagedserve.metrics.record import RunRecord
from pagedserve.metrics.summary import summarize
from pagedserve.metrics.tokens import inter_token_s, request_times, token_times

ALL = (
    plots.latency_distributions,
    plots.memory_over_time,
    plots.load_over_time,
    plots.policies_compared,
)


@pytest.fixture(scope="module")
def runs() -> dict[str, RunRecord]:
    return {
        "paged": toy_record(rate=8),
        "reserved": toy_record(rate=8, reserve=2048),
        "slow": toy_record(base_ms=12),
    }


def curves(axes: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(np.asarray(line.get_xdata()), np.asarray(line.get_ydata())) for line in axes.get_lines()]


def png_size(figure: Any) -> int:
    file = BytesIO()
    figure.savefig(file, format="png")
    return len(file.getvalue())


@pytest.mark.parametrize("plot", ALL)
def test_a_figure_is_drawn_and_left_to_its_owner(
    plot: Callable[..., Any], runs: dict[str, RunRecord]
) -> None:
    style = plt.rcParams["font.size"], plt.rcParams["axes.spines.top"]
    figure = plot(runs)
    assert png_size(figure) > 10_000
    assert plt.get_fignums() == []
    assert (plt.rcParams["font.size"], plt.rcParams["axes.spines.top"]) == style


@pytest.mark.parametrize("plot", ALL)
@pytest.mark.filterwarnings("error")
def test_runs_with_little_in_them_are_drawn_without_a_warning(plot: Callable[..., Any]) -> None:
    one_token = hand_record(
        [{"schedule_ns": 0, "commit_ns": MS, "num_blocks_used": 1, "num_running": 1}],
        [{"request": 0, "num_output_tokens": 1, "first_schedule_ns": 0, "finish_ns": MS}],
        [(0, 0, 1)],
    )
    assert png_size(plot({"empty": hand_record([], [], [])})) > 1000
    assert png_size(plot({"one token": one_token, "empty": hand_record([], [], [])})) > 1000


@pytest.mark.parametrize("plot", ALL)
def test_nothing_to_draw_is_an_error(plot: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="no records to draw"):
        plot({})


def test_distributions_are_the_empirical_ones(runs: dict[str, RunRecord]) -> None:
    left, right = plots.latency_distributions(runs).axes
    assert len(curves(left)) == len(curves(right)) == len(runs)
    for i, record in enumerate(runs.values()):
        tokens = token_times(record)
        for axes, values in (
            (left, request_times(record, tokens).ttft_s),
            (right, inter_token_s(tokens) * 1e3),
        ):
            x, share = curves(axes)[i]
            ordered = np.sort(values)
            assert (share[0], share[-1], x[-1]) == (0, 1, ordered[-1])
            below, at = (np.searchsorted(ordered, x, side=side) / ordered.size for side in ("left", "right"))
            assert ((below <= share) & (share <= at)).all()
    assert left.get_title("right") == right.get_title("right") == "left is better"


def test_long_distributions_are_thinned_but_keep_their_tail() -> None:
    steps = [{"schedule_ns": i * MS, "commit_ns": i * MS + 1, "num_decode_tokens": 1} for i in range(20_000)]
    steps[-1]["commit_ns"] += 5 * MS
    record = hand_record(steps, [{"request": 0, "num_output_tokens": 20_000}], [(0, 0, 20_000)])
    x, share = curves(plots.latency_distributions({"long": record}).axes[1])[0]
    assert len(x) <= plots.NUM_ECDF_POINTS + 1
    assert (share > 0.99).sum() > 100
    assert x[-1] == pytest.approx(6)


def test_tokens_at_the_same_instant_need_no_logarithm() -> None:
    steps = [{"num_decode_tokens": 1}] * 3
    record = hand_record(steps, [{"request": 0, "num_output_tokens": 3}], [(0, 0, 3)])
    assert plots.latency_distributions({"instant": record}).axes[1].get_xscale() == "linear"


def test_the_stretched_axis_maps_back() -> None:
    shares = np.linspace(0, 0.999, 50)
    heights = plots._stretch(shares)
    assert (np.diff(heights) > 0).all()
    np.testing.assert_allclose(plots._unstretch(heights), shares, atol=1e-12)


def test_lines_over_time_average_to_the_summary(runs: dict[str, RunRecord]) -> None:
    summary = summarize(runs["paged"])
    memory = plots.memory_over_time({"paged": runs["paged"]}).axes
    load = plots.load_over_time({"paged": runs["paged"]}).axes
    _, occupancy = curves(memory[0])[0]
    _, running = curves(load[0])[0]
    _, waiting = curves(load[1])[0]
    assert len(occupancy) == plots.NUM_BINS
    assert occupancy.mean() / 100 == pytest.approx(summary.kv_occupancy_mean)
    assert running.mean() == pytest.approx(summary.num_running_mean)
    assert waiting.mean() == pytest.approx(summary.num_waiting_mean)
    assert memory[1].get_title("right") == load[1].get_title("right") == "lower is better"


def test_waste_leaves_a_gap_where_nothing_is_allocated() -> None:
    state = {"num_blocks_used": 2, "num_wasted_slots": 2}
    record = hand_record(
        [
            {"schedule_ns": 0, "commit_ns": 10 * MS, **state},
            {"schedule_ns": 90 * MS, "commit_ns": 100 * MS, **state},
        ],
        [
            {"request": i, "first_schedule_ns": t * MS, "finish_ns": (t + 10) * MS}
            for i, t in enumerate((0, 90))
        ],
        [],
    )
    upper, lower = plots.memory_over_time({"idle": record}, num_bins=10).axes
    np.testing.assert_allclose(curves(upper)[0][1], [20] + [0] * 8 + [20], atol=1e-9)
    np.testing.assert_allclose(curves(lower)[0][1], [25] + [np.nan] * 8 + [25])


def test_a_pool_without_limit_is_drawn_in_blocks(runs: dict[str, RunRecord]) -> None:
    paged = runs["paged"]
    unlimited = RunRecord(
        {**paged.header, "limits": {"block_size": 16, "num_blocks": None}},
        paged.steps,
        paged.requests,
        paged.emissions,
        paged.calls,
    )
    upper = plots.memory_over_time({"unlimited": unlimited}).axes[0]
    assert upper.get_ylabel() == "blocks"
    _, shares = curves(plots.memory_over_time({"paged": paged}).axes[0])[0]
    np.testing.assert_allclose(curves(upper)[0][1], shares / 100 * 400)


def test_policies_have_one_panel_a_metric_with_the_value_written(runs: dict[str, RunRecord]) -> None:
    figure = plots.policies_compared(runs)
    assert [axes.get_title("left") for axes in figure.axes] == [shown.heading for shown in POLICY_COLUMNS]
    for axes, shown in zip(figure.axes, POLICY_COLUMNS, strict=True):
        values = [getattr(summarize(record), shown.metric) for record in runs.values()]
        bars = axes.containers[0].datavalues  # pyright: ignore[reportAttributeAccessIssue]
        assert bars.tolist() == pytest.approx([value * shown.scale for value in values])
        assert [text.get_text() for text in axes.texts] == [shown.text(value) for value in values]
        assert axes.get_xlabel() == (f"{shown.better} is better" if shown.better else "")
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == list(runs)


LONG_LABELS = (
    "mixed",
    "mixed,allocator=contiguous_max",
    "prefill_first,enable_prefix_caching=false,watermark=0.05",
    "runs/" + "x" * 60,
)


def test_long_labels_leave_every_text_of_a_comparison_its_own_place() -> None:
    figure = plots.policies_compared(dict.fromkeys(LONG_LABELS, toy_record(num_requests=5)))
    figure.draw_without_rendering()
    shown = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert [text.replace("\n", "") for text in shown] == list(LONG_LABELS)
    texts = [text for axes in figure.axes for text in axes.texts]
    for axes in figure.axes:
        texts += [axes._left_title, axes.xaxis.label, *axes.get_yticklabels()]  # pyright: ignore[reportAttributeAccessIssue]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text()]
    assert len(boxes) == 9 + 7 + 9 * len(LONG_LABELS) + 3 * len(LONG_LABELS)
    overlapping = [
        (a, b) for i, (a, one) in enumerate(boxes) for b, other in boxes[:i] if one.overlaps(other)
    ]
    assert not overlapping
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for _, box in boxes)


@pytest.mark.parametrize(
    ("labels", "num_rows"), [(("mixed", "static", "serial", "vllm_v1", "mine"), 2), (LONG_LABELS, 4)]
)
def test_a_legend_stays_within_the_figure(labels: tuple[str, ...], num_rows: int) -> None:
    figure = plots.load_over_time(dict.fromkeys(labels, toy_record(num_requests=5)))
    figure.draw_without_rendering()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
    assert len({round(text.get_window_extent().y0) for text in legend.get_texts()}) == num_rows


def test_labels_keep_one_look_and_no_two_share_one() -> None:
    record = toy_record(num_requests=5)
    many = {f"policy {i}": record for i in range(12)}
    figure = plots.load_over_time(many)
    looks = {(str(line.get_color()), line.is_dashed()) for line in figure.axes[0].get_lines()}
    assert len(looks) == 12
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(many)
    assert not plots.load_over_time({"alone": record}).legends


@pytest.mark.parametrize(("seconds", "unit"), [(50, "seconds"), (1200, "minutes"), (30_000, "hours")])
def test_the_time_axis_suits_the_length_of_the_run(seconds: int, unit: str) -> None:
    record = hand_record([{"schedule_ns": 0, "commit_ns": seconds * 1000 * MS}], [], [])
    assert plots.load_over_time({"a": record}).axes[1].get_xlabel() == f"{unit} since the first step"


def test_measuring_does_not_import_the_plotting_stack() -> None:
    code = (
        "import sys, pagedserve.metrics.plots, pagedserve.metrics.compare;"
        "print([m for m in ('matplotlib', 'seaborn', 'scipy', 'torch', 'simpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
