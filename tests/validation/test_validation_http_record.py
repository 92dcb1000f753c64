import json
import math
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pagedserve.metrics.compare import as_shown, compare, ks_distances, policy_table
from pagedserve.metrics.identity import first_difference
from pagedserve.metrics.plots import (
    latency_distributions,
    load_over_time,
    memory_over_time,
    policies_compared,
)
from pagedserve.metrics.record import RecordError, RunRecord
from pagedserve.metrics.record_tables import CLIENT_SCHEMAS, SCHEMAS, UNSEEN
from pagedserve.metrics.summary import Slo, Summary, summarize
from pagedserve.metrics.timeline import step_timeline
from pagedserve.metrics.tokens import token_times
from pagedserve.policy import Limits
from pagedserve.simulator.devices import device
from pagedserve.simulator.geometry import geometry
from pagedserve.simulator.roofline import RooflineCost
from pagedserve.simulator.simulate import simulate
from pagedserve.traces.trace import Trace
from pagedserve.validation.decisions import check_decisions
from pagedserve.validation.http_replay import client_record
from pagedserve.validation.http_stream import Reply

MS = 1_000_000
START = 1_000_000 * MS
TRACE = Trace.of("four", [0, 0, 10 * MS, 20 * MS], [8, 4, 6, 2], [4, 2, 3, 5])


def at(ms: float) -> int:
    """A time of the trace on the client's clock."""
    return START + round(ms * MS)


def arrivals(*pairs: tuple[float, int]) -> tuple[tuple[int, int], ...]:
    return tuple((at(ms), count) for ms, count in pairs)


REPLIES = [
    Reply(at(1), at(50), arrivals((11, 1), (30, 2), (50, 1)), "length", None, 4, 6),
    Reply(at(2), at(30), arrivals((20, 1), (30, 1)), "length", None, 2, 0),
    Reply(at(10), at(61), arrivals((40, 1)), "error", "gone", None, None, "assumed"),
    Reply(at(25), at(25), (), "error", "HTTP 503: busy"),
]
SEEN = (
    *("num_requests", "num_finished", "num_prompt_tokens", "num_output_tokens", "duration_s"),
    *("output_tokens_per_s", "total_tokens_per_s", "requests_per_s", "prefix_hit_rate", "slo_attainment"),
    "goodput_per_s",
)


@pytest.fixture
def record() -> RunRecord:
    return client_record(TRACE, "http://host", "tiny", START, REPLIES, [9, 3, 0])


def test_the_tables_of_a_client(record: RunRecord) -> None:
    assert record.array("steps", "commit_ns").tolist() == [ms * MS for ms in (11, 20, 30, 40, 50)]
    for name in UNSEEN["steps"]:
        assert record.steps.column(name).null_count == 5, name
    assert record.array("requests", "arrival_ns").tolist() == [ms * MS for ms in (1, 2, 10, 25)]
    assert record.requests.column("error").to_pylist() == [None, None, "gone", "HTTP 503: busy"]
    assert record.requests.column("num_prefix_hit_tokens").to_pylist() == [6, 0, None, None]
    assert record.calls.num_rows == 0
    assert record.plans is None
    tokens = token_times(record)
    assert tokens.offsets.tolist() == [0, 4, 6, 7, 7]
    assert (tokens.time_ns // MS).tolist() == [11, 30, 30, 50, 20, 30, 40]


def test_the_counters_of_a_client(record: RunRecord) -> None:
    assert record.header["counters"] == {
        "send_lag_p50_ns": 1.5 * MS,
        "send_lag_max_ns": 5 * MS,
        "client_stall_p50_ns": 3,
        "client_stall_max_ns": 9,
        "num_failed": 2,
        "num_chunks": 6,
        "num_usage_tokens": 6,
        "num_requests_spread": 0,
        "num_requests_assumed": 1,
        "num_other_lengths": 0,
    }


def test_it_is_measured_as_any_run_and_what_is_unseen_is_nan(record: RunRecord) -> None:
    found = summarize(record, Slo(ttft_s=0.015))
    assert found.finish_reasons == {"length": 2, "error": 2}
    assert (found.ttft_p50_s, found.ttft_max_s) == (pytest.approx(0.018), pytest.approx(0.030))
    assert (found.itl_p50_s, found.itl_max_s) == (pytest.approx(0.0145), pytest.approx(0.020))
    assert found.e2e_max_s == pytest.approx(0.049)
    assert found.output_tokens_per_s == pytest.approx(7 / 0.049)
    assert found.prefix_hit_rate == 6 / 12, "of the requests for which the server said"
    assert found.slo_attainment == 1 / 4
    measured = ("ttft", "itl", "tpot", "e2e")
    for field in fields(Summary):
        if field.name != "finish_reasons":
            is_seen = field.name in SEEN or field.name.startswith(measured)
            assert math.isnan(getattr(found, field.name)) != is_seen, field.name
    assert found.as_dict()["num_running_peak"] is None


def test_a_client_s_time_line_spans_its_run_and_holds_no_state(record: RunRecord) -> None:
    timeline = step_timeline(record)
    assert timeline.duration_s == pytest.approx(0.039)
    assert math.isnan(timeline.mean(record.array_or_nan("steps", "num_running")))


def test_a_run_in_which_nothing_came(record: RunRecord) -> None:
    nothing = client_record(
        TRACE[:1], "http://host", "tiny", START, [Reply(at(0), at(3), (), "error", "gone")]
    )
    found = summarize(nothing)
    assert (found.num_output_tokens, found.duration_s) == (0, 0)
    assert math.isnan(found.num_running_peak)
    memory_over_time({"client": nothing})


def test_it_survives_its_files(record: RunRecord, tmp_path: Path) -> None:
    record.save(tmp_path / "run")
    loaded = RunRecord.load(tmp_path / "run")
    assert first_difference(record, loaded) is None
    assert loaded.header == record.header
    for name, table in loaded.tables().items():
        assert table.schema.equals(CLIENT_SCHEMAS[name]), name
    assert CLIENT_SCHEMAS["steps"] != SCHEMAS["steps"]


def test_nulls_are_a_client_s_and_nobody_else_s(record: RunRecord) -> None:
    live = {**record.header, "kind": "live", "overlap_depth": 0}
    with pytest.raises(RecordError, match=r"steps: column schedule_ns: expected no nulls, found 5"):
        RunRecord(live, record.steps, record.requests, record.emissions, record.calls)
    with pytest.raises(RecordError, match=r"overlap_depth: expected int, found None"):
        RunRecord(
            {**live, "overlap_depth": None}, record.steps, record.requests, record.emissions, record.calls
        )
    place = record.steps.schema.get_field_index("commit_ns")
    timeless = record.steps.set_column(place, "commit_ns", pa.nulls(5, pa.int64()))
    with pytest.raises(RecordError, match=r"steps: column commit_ns: expected no nulls, found 5"):
        RunRecord(record.header, timeless, record.requests, record.emissions, record.calls)


def test_a_reader_refuses_nulls_in_the_files_of_an_engine(record: RunRecord, tmp_path: Path) -> None:
    record.save(tmp_path)
    header = json.loads((tmp_path / "header.json").read_text())
    (tmp_path / "header.json").write_text(json.dumps({**header, "kind": "simulated", "overlap_depth": 0}))
    with pytest.raises(RecordError, match=r"steps: column schedule_ns: expected no nulls"):
        RunRecord.load(tmp_path)


@pytest.fixture
def simulated() -> RunRecord:
    cost = RooflineCost(device("h200"), geometry("Llama-3.1-8B"))
    return simulate(TRACE, "mixed", cost, Limits(num_blocks=64, block_size=4))


def test_records_of_version_1_are_still_read(simulated: RunRecord, tmp_path: Path) -> None:
    old = replace(simulated, header={**simulated.header, "format_version": 1})
    old.save(tmp_path)
    assert pq.read_schema(tmp_path / "steps.parquet").equals(SCHEMAS["steps"])
    assert summarize(RunRecord.load(tmp_path)).as_dict() == summarize(simulated).as_dict()


def test_it_is_compared_with_what_sees_more(record: RunRecord, simulated: RunRecord) -> None:
    unseen = {"kv_occupancy_mean", "waste_mean", "num_running_peak"}
    errors = compare(record, simulated)["error_pct"].to_dict()
    assert {name for name, error in errors.items() if math.isnan(error)} == unseen
    table = policy_table({"client": record, "simulated": simulated})
    assert {name for name, value in table.loc["client"].to_dict().items() if math.isnan(value)} == unseen
    assert not table.loc["simulated"].isna().any()
    assert as_shown(table).loc["client", "peak running"] == "–"
    assert ks_distances(record, simulated)["ttft_ks"] > 0


def test_it_is_drawn_beside_what_sees_more(record: RunRecord, simulated: RunRecord) -> None:
    both = {"client": record, "simulated": simulated}
    upper, lower = load_over_time(both).axes[:2]
    for panel in (upper, lower):
        unseen, seen = (np.asarray(line.get_ydata(), float) for line in panel.get_lines())
        assert np.isnan(unseen).all()
        assert not np.isnan(seen).any()
    assert memory_over_time(both).axes[0].get_ylabel() == "% of blocks"
    assert len(latency_distributions(both).axes[0].get_lines()) == 2
    texts = [text.get_text() for axes in policies_compared(both).axes for text in axes.texts]
    assert texts.count("–") == 3
    memory_over_time({"client": record})


def test_decisions_cannot_be_checked_from_outside(record: RunRecord) -> None:
    with pytest.raises(ValueError, match=r"a client sees no decisions of its server.*kind live"):
        check_decisions(record, "mixed")
