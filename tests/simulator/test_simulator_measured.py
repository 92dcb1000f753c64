"""The measured cost model: what it was measured on comes back, between it is linear, beyond it says so."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured_profiles import GRID, LIMITS, formula_ns, profile_of

from pagedserve.metrics.profile import ProfileError
from pagedserve.policy import StepShape
from pagedserve.simulator.cost import ShapeBatch
from pagedserve.simulator.measured import MeasuredCost
from pagedserve.simulator.simulate import simulate
from pagedserve.traces.trace import Trace

COST = MeasuredCost(profile_of())


def crooked(shape: StepShape) -> int:
    """A device with steps and bends: nothing that a straight line would hit by chance."""
    tokens = sum(n for n, _ in shape.chunks) + shape.num_decodes
    longest = max((c for _, c in shape.chunks), default=0)
    return formula_ns(shape) + 1_000 * tokens**2 + 7 * longest**2 + 40 * shape.decode_context_sumsq // 100


def shapes() -> st.SearchStrategy[StepShape]:
    chunk = st.tuples(st.integers(1, 300), st.integers(0, 900))
    contexts = st.lists(st.integers(1, 900), max_size=20)

    def shape(chunks: list[tuple[int, int]], decodes: list[int], num_samples: int) -> StepShape:
        return StepShape(
            tuple(chunks),
            len(decodes),
            sum(decodes),
            max(decodes, default=0),
            sum(c * c for c in decodes),
            len(decodes) + min(num_samples, len(chunks)),
        )

    drawn = st.builds(shape, st.lists(chunk, max_size=3), contexts, st.integers(0, 3))
    return drawn.filter(lambda shape: bool(shape.chunks or shape.num_decodes))


@pytest.mark.parametrize("time_ns", [formula_ns, crooked])
@pytest.mark.parametrize("quantile", ["p20", "p50", "p80"])
def test_every_measured_step_gets_its_own_time_back(time_ns, quantile):
    profile = profile_of(time_ns)
    cost = MeasuredCost(profile, quantile)
    exact = [
        point
        for point in profile.steps
        if point.kind in ("chunk", "mixed")
        or (
            point.kind == "decode"
            and point.shape.decode_context_max * point.shape.num_decodes == point.shape.decode_context_sum
        )
    ]
    assert {point.kind for point in exact} == {"chunk", "mixed", "decode"}
    for point in exact:
        assert abs(cost.step_ns(point.shape) - getattr(point, f"{quantile}_ns")) <= 1, point


def test_a_linear_device_is_known_everywhere():
    # Several chunks, unequal contexts, nothing sampled: combinations that were never measured.
    for shape in (
        StepShape(((40, 300), (7, 0)), 3, 500, 400, 170_000, 4),
        StepShape(((100, 200),), 0, 0, 0, 0, 0),
        StepShape((), 6, 900, 600, 400_000, 6),
        StepShape(((5, 5), (5, 5), (50, 100)), 0, 0, 0, 0, 3),
    ):
        assert COST.step_ns(shape) == pytest.approx(formula_ns(shape), rel=1e-9)


@given(st.lists(shapes(), min_size=1, max_size=8))
def test_one_step_and_many_at_once_give_the_same_integers(steps):
    one, many = MeasuredCost(profile_of(crooked)), MeasuredCost(profile_of(crooked))
    batch = ShapeBatch.from_shapes(steps)
    assert many.steps_ns(batch).tolist() == [one.step_ns(shape) for shape in steps]
    assert many.hosts_ns(batch).tolist() == [one.host_ns(shape) for shape in steps]
    assert many.num_extrapolated == one.num_extrapolated


def test_a_long_steady_run_equals_its_steps():
    first = StepShape((), 5, 400, 200, 60_000, 5)
    batch = ShapeBatch.from_steady_decodes(first, 600)
    contexts = np.arange(600)
    walked = [
        COST.step_ns(StepShape((), 5, 400 + 5 * k, 200 + k, 60_000 + 800 * k + 5 * k * k, 5))
        for k in contexts.tolist()
    ]
    assert COST.steps_ns(batch).tolist() == walked


@pytest.mark.parametrize(
    ("inside", "outside"),
    [
        (StepShape(((128, 0),), 0, 0, 0, 0, 1), StepShape(((129, 0),), 0, 0, 0, 0, 1)),
        (StepShape(((8, 512),), 0, 0, 0, 0, 1), StepShape(((8, 513),), 0, 0, 0, 0, 1)),
        (StepShape((), 8, 800, 100, 80_000, 8), StepShape((), 9, 900, 100, 90_000, 9)),
        (StepShape((), 1, 256, 256, 65_536, 1), StepShape((), 1, 599, 599, 358_801, 1)),
    ],
)
def test_what_was_not_measured_is_counted(inside, outside):
    cost = MeasuredCost(profile_of())
    cost.step_ns(inside)
    assert cost.num_extrapolated == 0
    cost.step_ns(outside)
    assert cost.num_extrapolated == 1
    cost.steps_ns(ShapeBatch.from_shapes([outside, inside, outside]))
    assert cost.num_extrapolated == 3


def test_each_simulation_counts_its_own_steps_outside():
    cost = MeasuredCost(profile_of())
    trace = Trace.of("wide", [0] * 12, [8] * 12, [30] * 12)
    counted = [
        simulate(trace, "mixed", cost, LIMITS).header["counters"]["num_extrapolated"] for _ in range(2)
    ]
    assert counted[0] == counted[1] > 0


def test_host_time_grows_with_the_rows():
    assert COST.host_ns(StepShape((), 1, 10, 10, 100, 1)) == 110_000
    assert COST.host_ns(StepShape(((4, 0),), 3, 30, 10, 300, 4)) == 140_000
    assert COST.host_ns(StepShape((), 10, 100, 10, 1_000, 10)) == 200_000


def test_a_pool_too_small_for_the_grid_still_gives_a_model():
    tight = replace(LIMITS, num_blocks=40, max_model_len=300)
    cost = MeasuredCost(profile_of(limits=tight, grid=replace(GRID, chunk_contexts=(0, 128))))
    shape = StepShape((), 8, 8 * 64, 64, 8 * 64 * 64, 8)
    assert cost.step_ns(shape) == pytest.approx(formula_ns(shape), rel=1e-9)


def test_a_profile_without_the_necessary_is_refused():
    profile = profile_of()
    for kind in ("chunk", "decode"):
        kept = tuple(point for point in profile.steps if point.kind != kind)
        with pytest.raises(ProfileError, match="measure again"):
            MeasuredCost(replace(profile, steps=kept))
    with pytest.raises(ValueError, match="quantile is 'p90'; choose from p20, p50, p80"):
        MeasuredCost(profile, "p90")  # pyright: ignore[reportArgumentType]


def test_the_description_names_device_profile_and_quantile():
    described = COST.describe()
    assert described["device"] == "a formula"
    assert described["profile_sha256"] == profile_of().sha256()
    assert described["quantile"] == "p50"
