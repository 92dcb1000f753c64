"""What a validation must notice, on the real engine: host time left out (case M1), and decisions that drifted."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from validation_engines import LIMITS, idle_engine, tiny_profile

from pagedserve.metrics.profile import HostPoint
from pagedserve.metrics.record import RunRecord
from pagedserve.metrics.summary import summarize
from pagedserve.policy import policy
from pagedserve.simulator.measured import MeasuredCost
from pagedserve.traces.trace import Trace
from pagedserve.validation.decisions import check_decisions
from pagedserve.validation.planning import Setting
from pagedserve.validation.validate import LiveBench

TRACE = Trace.of("busy", [0] * 16, [9 + 5 * (i % 4) for i in range(16)], [3 + i for i in range(16)])
TIGHT = replace(LIMITS, num_blocks=24)


@pytest.fixture(scope="module")
def live() -> RunRecord:
    """A live run under memory pressure."""
    with idle_engine(TIGHT) as idle:
        record = LiveBench(idle).replay(TRACE, Setting(policy("mixed"), TIGHT))
    assert summarize(record).num_preemptions > 0
    return record


def test_a_live_run_stamps_its_host_time(live: RunRecord) -> None:
    gaps = live.array("steps", "launch_ns") - live.array("steps", "schedule_ns")
    assert (gaps > 0).all()


def test_host_time_left_out_makes_everything_early() -> None:
    profile = tiny_profile()
    free = replace(profile, host=tuple(HostPoint(p.num_rows, 0, 0, 0, p.num_repeats) for p in profile.host))
    setting = Setting(policy("mixed"), LIMITS)
    whole, without = (summarize(setting.simulated(TRACE, MeasuredCost(each))) for each in (profile, free))
    assert without.ttft_p50_s < whole.ttft_p50_s
    assert without.itl_p50_s < whole.itl_p50_s
    assert without.output_tokens_per_s > whole.output_tokens_per_s


def test_an_honest_run_is_retraced(live: RunRecord) -> None:
    found = check_decisions(live, "mixed", check=True)
    assert found.identical, found.first_difference


@pytest.mark.parametrize("other", ["prefill_first", "static", "serial"])
def test_another_policy_is_seen(live: RunRecord, other: str) -> None:
    assert not check_decisions(live, other).identical


def test_a_stop_a_token_late_is_seen(live: RunRecord) -> None:
    lengths = live.array("requests", "num_output_tokens").copy()
    lengths[int(np.argmin(lengths))] += 1
    place = live.requests.schema.get_field_index("num_output_tokens")
    column = pa.array(lengths, live.requests.schema.field(place).type)
    drifted = replace(
        live, requests=live.requests.set_column(place, live.requests.schema.field(place), column)
    )
    assert not check_decisions(drifted, "mixed").identical


def test_a_block_of_another_is_seen(live: RunRecord) -> None:
    assert live.plans is not None
    rows = live.plans.to_pylist()
    row = next(row for row in rows if len(row["block_ids"]) > 1)
    row["block_ids"] = [row["block_ids"][1], row["block_ids"][0], *row["block_ids"][2:]]
    drifted = replace(live, plans=pa.Table.from_pylist(rows, schema=live.plans.schema))
    found = check_decisions(drifted, "mixed")
    assert not found.identical
    assert found.first_difference is not None
    assert "block_ids" in found.first_difference
