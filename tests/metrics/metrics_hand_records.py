"""Tiny run records written by hand, for tests whose answers are worked out on paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagedserve.metrics.record import RunRecord, build_table
from pagedserve.metrics.record_tables import FORMAT_VERSION, TABLES

MS = 1_000_000
STEP_DEFAULTS: dict[str, Any] = dict.fromkeys((column.name for column in TABLES["steps"]), 0)
REQUEST_DEFAULTS: dict[str, Any] = {
    **{column.name: None if column.nullable else 0 for column in TABLES["requests"]},
    "num_prompt_tokens": 1,
    "max_tokens": 16,
    "finish_reason": "length",
    "tenant": "",
    "deadline_ns": None,
    "predicted_output_tokens": None,
}


def header(**changes: Any) -> dict[str, Any]:
    """A legal header: a pool of 10 blocks of 4 slots."""
    return {
        "format_version": FORMAT_VERSION,
        "kind": "simulated",
        "policy": {"batching": "mixed"},
        "limits": {"num_blocks": 10, "block_size": 4},
        "overlap_depth": 0,
        "seed": 0,
        "device": None,
        "cost": None,
        "trace": {"name": "by hand"},
        "versions": {"pagedserve": "0"},
        "counters": {},
        **changes,
    }


def rows_table(name: str, rows: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any] | None = None):
    """A table from one dict a row, columns not named taken from ``defaults``."""
    full = [{**(defaults or {}), **row} for row in rows]
    return build_table(name, {c.name: [row[c.name] for row in full] for c in TABLES[name]})


def hand_record(
    steps: list[dict[str, Any]],
    requests: list[dict[str, Any]],
    emissions: list[tuple[int, int, int]],
    *,
    calls: list[tuple[str, int | None, int]] | None = None,
    plans: list[dict[str, Any]] | None = None,
    **header_changes: Any,
) -> RunRecord:
    """A record from what matters to a test; everything not said is 0, null or a default."""
    numbered = [{"step": i, **step} for i, step in enumerate(steps)]
    runs = [{"request": r, "first_step": first, "num_steps": n} for r, first, n in emissions]
    call_rows = [{"kind": kind, "subject": subject, "now_ns": now} for kind, subject, now in calls or []]
    no_plan: dict[str, Any] = {
        c.name: [] if c.name not in ("step", "num_decodes") else 0 for c in TABLES["plans"]
    }
    return RunRecord(
        header=header(**header_changes),
        steps=rows_table("steps", numbered, STEP_DEFAULTS),
        requests=rows_table("requests", requests, REQUEST_DEFAULTS),
        emissions=rows_table("emissions", runs),
        calls=rows_table("calls", call_rows),
        plans=None if plans is None else rows_table("plans", plans, no_plan),
    )
