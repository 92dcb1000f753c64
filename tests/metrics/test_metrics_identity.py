import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from metrics_hand_records import hand_record
from metrics_toy_runs import toy_record

from pagedserve.metrics.identity import PARTS, content_digest, first_difference, records_equal
from pagedserve.metrics.record import RunRecord

STEPS = [{"commit_ns": 10 * i, "num_running": i} for i in range(4)]
REQUESTS = [{"request": 5, "prefix_keys": [1, 2]}, {"request": 6, "prefix_keys": None, "tenant": "a"}]
CALLS: list[tuple[str, int | None, int]] = [("add", 5, 0), ("schedule", None, 1), ("commit", 0, 2)]
PLANS = [{"step": i, "preempted": [i], "block_ids": [i, i + 1]} for i in range(4)]


def base() -> RunRecord:
    return hand_record(STEPS, REQUESTS, [(5, 0, 1)], calls=CALLS, plans=PLANS)


def changed(what: str) -> RunRecord:
    """``base`` with one planted fault."""
    steps, requests, calls, plans = [dict(s) for s in STEPS], [dict(r) for r in REQUESTS], [*CALLS], [*PLANS]
    emissions, seed = [(5, 0, 1)], 0
    match what:
        case "step":
            steps[2]["num_running"] = 9
        case "key":
            requests[0]["prefix_keys"] = [1, 3]
        case "null key list":
            requests[1]["prefix_keys"] = []
        case "tenant":
            requests[1]["tenant"] = "b"
        case "victim":
            plans[3] = {**plans[3], "preempted": [0]}
        case "split of a list":
            plans[1] = {**plans[1], "preempted": [1, 1], "block_ids": [2]}
        case "call":
            calls[1] = ("schedule", 0, 1)
        case "verb":
            calls[0] = ("abort", 5, 0)
        case "emission":
            emissions = [(5, 1, 1)]
        case "seed":
            seed = 1
        case "missing row":
            steps.pop()
    return hand_record(steps, requests, emissions, calls=calls, plans=plans, seed=seed)


FAULTS = {
    "step": "steps: row 2 (step 2), column num_running: 2 in the first, 9 in the second",
    "key": "requests: row 0 (request 5), column prefix_keys: [1, 2] in the first, [1, 3] in the second",
    "null key list": "requests: row 1 (request 6), column prefix_keys: null in the first, [] in the second",
    "tenant": "requests: row 1 (request 6), column tenant: 'a' in the first, 'b' in the second",
    "victim": "plans: row 3 (step 3), column preempted: [3] in the first, [0] in the second",
    "split of a list": "plans: row 1 (step 1), column preempted: [1] in the first, [1, 1] in the second",
    "call": "calls: row 1 (kind schedule), column subject: null in the first, 0 in the second",
    "verb": "calls: row 0, column kind: 'add' in the first, 'abort' in the second",
    "emission": "emissions: row 0 (request 5), column first_step: 0 in the first, 1 in the second",
    "seed": "header.seed: 0 in the first, 1 in the second",
    "missing row": "steps: 4 rows in the first, 3 in the second; those shared are equal",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_named(fault: str) -> None:
    assert first_difference(base(), changed(fault)) == FAULTS[fault]
    assert not records_equal(base(), changed(fault))
    assert content_digest(base()) != content_digest(changed(fault))


def test_equal_records_are_equal() -> None:
    assert first_difference(base(), base()) is None
    assert records_equal(base(), base())
    assert content_digest(base()) == content_digest(base())


def test_the_earliest_row_is_named_before_the_leftmost_column() -> None:
    late = [{**s, "step": 9} if i == 3 else s for i, s in enumerate(STEPS)]
    both = [{**s, "num_running": 7} if i == 1 else s for i, s in enumerate(late)]
    found = first_difference(hand_record(STEPS, [], []), hand_record(both, [], []))
    assert found is not None
    assert found.startswith("steps: row 1 (step 1), column num_running")


def test_absent_plans_differ_from_none_at_all() -> None:
    without = hand_record(STEPS, REQUESTS, [(5, 0, 1)], calls=CALLS)
    empty = hand_record(STEPS, REQUESTS, [(5, 0, 1)], calls=CALLS, plans=[])
    assert first_difference(without, empty) == "plans: only the second record has this table"
    assert first_difference(empty, without) == "plans: only the first record has this table"
    assert content_digest(without) != content_digest(empty)


def test_where_one_list_ends_and_the_next_begins_is_content() -> None:
    a = hand_record([], [], [], plans=[{"block_ids": [1, 2]}, {"block_ids": [3]}])
    b = hand_record([], [], [], plans=[{"block_ids": [1]}, {"block_ids": [2, 3]}])
    assert (
        first_difference(a, b)
        == "plans: row 0 (step 0), column block_ids: [1, 2] in the first, [1] in the second"
    )
    assert content_digest(a) != content_digest(b)


def test_parts_can_be_chosen() -> None:
    fault = changed("victim")
    without_plans = [part for part in PARTS if part != "plans"]
    assert records_equal(base(), fault, without_plans)
    assert content_digest(base(), without_plans) == content_digest(fault, without_plans)
    assert not records_equal(base(), fault, ["plans"])
    with pytest.raises(ValueError, match=r"unknown parts \['plan'\]"):
        first_difference(base(), fault, ["plan"])


def test_versions_and_tuples_are_no_difference_but_types_are() -> None:
    a = hand_record([], [], [], policy={"order": ("fcfs", 1)}, versions={"python": "3.11"})
    b = hand_record([], [], [], policy={"order": ["fcfs", 1]}, versions={"python": "3.12"})
    c = hand_record([], [], [], policy={"order": ["fcfs", True]})
    assert first_difference(a, b) is None
    assert content_digest(a) == content_digest(b)
    assert first_difference(b, c) is not None
    d = hand_record([], [], [], policy={})
    assert first_difference(a, d) == "header.policy.order: only in the first record"


def test_layout_in_memory_is_not_content(tmp_path: Path) -> None:
    whole = base()
    whole.save(tmp_path)

    def pieces(table: pa.Table) -> pa.Table:
        doubled = pa.concat_tables([table.slice(1), table, table])
        return doubled.slice(table.num_rows - 1, table.num_rows)  # other chunks, other offsets

    assert whole.plans is not None
    cut = RunRecord(
        json.loads(json.dumps(whole.header)),
        pieces(whole.steps),
        pieces(whole.requests),
        pieces(whole.emissions),
        pieces(whole.calls),
        pieces(whole.plans),
    )
    assert first_difference(whole, cut) is None
    assert content_digest(whole) == content_digest(cut) == content_digest(RunRecord.load(tmp_path))


def test_column_order_and_dictionary_order_are_not_content() -> None:
    whole = base()
    kinds = whole.calls.column("kind").combine_chunks()
    words = list(reversed(kinds.dictionary.to_pylist()))
    codes = pa.array([words.index(kind) for kind in kinds.to_pylist()], pa.int32())
    turned = whole.calls.set_column(0, "kind", pa.DictionaryArray.from_arrays(codes, pa.array(words)))
    other = RunRecord(
        whole.header,
        whole.steps.select(list(reversed(whole.steps.column_names))),
        whole.requests,
        whole.emissions,
        turned,
        whole.plans,
    )
    assert first_difference(whole, other) is None
    assert content_digest(whole) == content_digest(other)


def test_same_seed_same_record_and_another_seed_another() -> None:
    assert content_digest(toy_record(seed=3)) == content_digest(toy_record(seed=3))
    assert first_difference(toy_record(seed=3), toy_record(seed=4)) is not None


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.data())
def test_any_single_changed_number_is_found_in_its_row(values: list[int], data: st.DataObject) -> None:
    row = data.draw(st.integers(0, len(values) - 1))
    spoilt = np.array(values)
    spoilt[row] += 1
    a = hand_record([{"num_waiting": v} for v in values], [], [])
    b = hand_record([{"num_waiting": int(v)} for v in spoilt], [], [])
    found = first_difference(a, b)
    assert found is not None
    assert found.startswith(f"steps: row {row} (step {row}), column num_waiting: {values[row]} in the first")
