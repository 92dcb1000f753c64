"""Swaps have a price in every cost model, the same for one step and for many; and none is refused before the run."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured_profiles import LIMITS, profile_of

from pagedserve.metrics.profile import ProfileError, SwapPoint
from pagedserve.policy import Limits, StepShape, policy
from pagedserve.simulator.constant import ConstantCost
from pagedserve.simulator.cost import CostModel, ShapeBatch, check_priced
from pagedserve.simulator.devices import DEVICES, device
from pagedserve.simulator.geometry import geometry
from pagedserve.simulator.measured import MeasuredCost
from pagedserve.simulator.roofline import RooflineCost
from pagedserve.simulator.simulate import simulate
from pagedserve.traces.trace import Trace

SWAP = policy("mixed", preemption_mode="swap", watermark=0.0)
DECODES = StepShape((), 4, 400, 150, 50_000, 4)


def bent(way: str, count: int) -> int:
    """A fixed start, and dearer the other way and the more there is."""
    return 30_000 + (17_000 if way == "out" else 23_000) * count + 11 * count * count


def models() -> list[CostModel]:
    return [
        ConstantCost(1_000_000, 10, 20, 30, per_swapped_block_ns=7_777),
        MeasuredCost(profile_of(swap_ns=bent)),
        RooflineCost(device("l40s"), geometry("Qwen3-0.6B")),
        RooflineCost(device("cpu"), geometry("SmolLM2-135M"), block_size=32),
    ]


def swapping(out: int, back: int) -> StepShape:
    return replace(DECODES, num_blocks_swapped_out=out, num_blocks_swapped_in=back)


@given(st.lists(st.tuples(st.integers(0, 600), st.integers(0, 600)), min_size=1, max_size=6))
def test_one_step_and_many_at_once_give_the_same_integers(counts: list[tuple[int, int]]) -> None:
    steps = [swapping(*each) for each in counts]
    for one, many in zip(models(), models(), strict=True):
        batch = ShapeBatch.from_shapes(steps)
        assert many.steps_ns(batch).tolist() == [one.step_ns(step) for step in steps]
        assert many.num_extrapolated == one.num_extrapolated


@pytest.mark.parametrize("index", range(4))
def test_every_block_costs_and_none_costs_nothing(index: int) -> None:
    cost = models()[index]
    none, *dearer = (
        cost.step_ns(swapping(out, back)) for out, back in ((0, 0), (1, 0), (9, 0), (9, 1), (9, 9))
    )
    assert none == cost.step_ns(DECODES)
    assert sorted({none, *dearer}) == [none, *dearer], "each is dearer than the one before"


def test_what_was_measured_comes_back() -> None:
    cost = MeasuredCost(profile_of(swap_ns=bent))
    base = cost.step_ns(DECODES)
    for count in (1, 4, 16, 64, 256):
        assert cost.step_ns(swapping(count, 0)) - base == pytest.approx(bent("out", count), abs=1)
        assert cost.step_ns(swapping(0, count)) - base == pytest.approx(bent("in", count), abs=1)
    between = cost.step_ns(swapping(10, 0)) - base
    assert between == pytest.approx((bent("out", 4) + bent("out", 16)) / 2, abs=1)
    assert cost.num_extrapolated == 0
    cost.step_ns(swapping(257, 0))
    cost.steps_ns(ShapeBatch.from_shapes([swapping(0, 300), swapping(256, 256)]))
    assert cost.num_extrapolated == 2


def test_what_was_not_measured_is_not_free() -> None:
    cost = MeasuredCost(profile_of())
    assert cost.step_ns(swapping(0, 0)) == cost.step_ns(DECODES)
    with pytest.raises(ProfileError, match="no measurements of swaps to host memory"):
        cost.step_ns(swapping(0, 1))
    with pytest.raises(ProfileError, match="no measurements of swaps to host memory"):
        cost.steps_ns(ShapeBatch.from_shapes([DECODES, swapping(1, 0)]))
    one_way = replace(profile_of(), swaps=(SwapPoint("in", 1, 1, 2, 3, 5),))
    with pytest.raises(ProfileError, match="none out: measure again"):
        MeasuredCost(one_way)


def test_who_cannot_price_swaps_is_refused_before_the_run() -> None:
    trace = Trace.of("one", [0], [8], [4])
    limits = replace(LIMITS, num_cpu_blocks=4)
    unmeasured, other_size = (
        MeasuredCost(profile_of()),
        RooflineCost(device("h200"), geometry("Qwen3-0.6B"), None, 32),
    )
    with pytest.raises(ProfileError, match="measure again with 'pagedserve profile', or let it recompute"):
        simulate(trace, SWAP, unmeasured, limits)
    with pytest.raises(
        ValueError, match=r"blocks of 32 tokens and the limits have 16: make it with block_size=16"
    ):
        simulate(trace, SWAP, other_size, limits)
    measured = MeasuredCost(profile_of(swap_ns=bent))
    with pytest.raises(
        ProfileError, match="of 16 tokens and the limits have 8: measure again with --block-size 8"
    ):
        check_priced(measured, SWAP, replace(limits, block_size=8))
    # Who never swaps is not asked for a price.
    for spec, own in ((policy("mixed"), limits), (SWAP, LIMITS)):
        check_priced(unmeasured, spec, own)
    check_priced(measured, SWAP, limits)
    simulate(trace, "mixed", unmeasured, limits)


def test_a_link_ten_times_as_fast_makes_swaps_as_much_cheaper() -> None:
    slow, model = device("h100"), geometry("Llama-3.1-8B")
    fast = replace(slow, host_bytes_per_s=10 * slow.host_bytes_per_s)
    shape = swapping(1_000, 0)
    times = [RooflineCost(each, model).parts_ns(shape)["swaps"] for each in (slow, fast)]
    assert 7 < times[0] / times[1] < 10
    # 1,000 blocks of 16 tokens of 128 KiB over 0.8 of 64 GB/s.
    assert times[0] == pytest.approx(
        1_000 * 16 * 131_072 / (0.8 * 64) + 2 * 1_000 * 16 * 131_072 / (0.8 * 3350), rel=1e-3
    )
    assert all(
        each.host_bytes_per_s < each.bytes_per_s and each.host_link_source for each in DEVICES.values()
    )


def test_swapping_costs_time_and_spares_tokens() -> None:
    """The same pressure, both modes: what is swapped is not computed again, and its copies take their time."""
    count = 12
    trace = Trace.of("burst", [0] * count, [40] * count, [60] * count)
    limits = Limits(
        max_num_batched_tokens=64, max_num_seqs=16, max_model_len=128, num_blocks=40, num_cpu_blocks=60
    )
    runs = {}
    for price in (0, 500_000):
        cost = ConstantCost(1_000_000, 100_000, per_swapped_block_ns=price)
        runs[price] = simulate(trace, SWAP, cost, limits, check=True)
    again = simulate(
        trace, policy("mixed", watermark=0.0), ConstantCost(1_000_000, 100_000), limits, check=True
    )
    for record in runs.values():
        steps = record.steps.to_pydict()
        assert sum(steps["num_blocks_swapped_out"]) == sum(steps["num_blocks_swapped_in"]) > 10
        assert max(steps["num_cpu_blocks_used"]) > 0
        assert sum(steps["num_recomputed_tokens"]) == 0
        took = [b - a for a, b in zip(steps["launch_ns"], steps["commit_ns"], strict=True)]
        blocks = np.add(steps["num_blocks_swapped_out"], steps["num_blocks_swapped_in"])
        price = next(price for price, run in runs.items() if run is record)
        expected = 1_000_000 + 100_000 * np.array(steps["num_prefill_tokens"]) + price * blocks
        assert took == expected.tolist()
    assert sum(again.array("steps", "num_recomputed_tokens").tolist()) > 10
