"""The same calls give the same plans and digests: in any process, under any hash seed, in any order of runs."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from policy_driver import Drive
from policy_scripts import Script, scripted

from pagedserve.metrics.plan_rows import plan_digest
from pagedserve.policy import Limits, PrefillChunk, Request, StepPlan, policy

ROOT = Path(__file__).resolve().parents[2]
RULES = ("serial", "static", "prefill_first", "mixed", "vllm_v1")


def keyed(request: int) -> Script:
    """One of six requests that share a prefix."""
    return scripted(
        request,
        3 + request,
        7,
        arrival_ns=6 * request,
        stop_after=(None, 4)[request % 2],
        family=1,
        shared=4,
        block_size=2,
    )


def digests() -> list[int]:
    """Digests of every plan of runs under pressure, with string keys, whose hashes differ by process."""
    found: list[int] = []
    for rule in RULES:
        for depth in (0, 1):
            drive = Drive(policy(rule, watermark=0.0), Limits(8, 4, 32, block_size=2, num_blocks=9), depth)
            drive.run([keyed(i) for i in range(6)], aborts={3: 55})
            assert rule == "serial" or drive.scheduler.num_preemptions
            found += [plan_digest(plan) for plan in drive.plans]
    return found


def test_digests_are_equal_in_other_processes_and_under_other_hash_seeds() -> None:
    code = "import test_policy_determinism as t; print(*t.digests())"
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    outputs: list[list[int]] = []
    for seed in ("0", "1", "4242"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        outputs.append([int(word) for word in done.stdout.split()])
    assert outputs[0] == outputs[1] == outputs[2] == digests()
    assert len(set(outputs[0])) > 100


PLAN = StepPlan(
    3,
    new_requests=(Request(4, 0, 5, 2),),
    chunks=(PrefillChunk(4, 0, 5, True),),
    decodes=(1, 2),
    joined=(2,),
    left=(0,),
    preempted=(3,),
    departed=(0,),
    new_blocks=((4, (7, 8)), (1, (9,))),
    filled=((1, 2),),
)


@pytest.mark.parametrize(
    "change",
    [
        {"step": 4},
        {"new_requests": ()},
        {"chunks": ()},
        {"chunks": (PrefillChunk(4, 0, 5, False),)},
        {"chunks": (PrefillChunk(4, 1, 5, True),)},
        {"decodes": ()},
        {"joined": ()},
        {"joined": (), "left": (2, 0)},
        {"left": (1,)},
        {"preempted": ()},
        {"departed": ()},
        {"new_blocks": ((4, (7, 9)), (1, (8,)))},
        {"new_blocks": ((4, (7,)), (1, (9,)))},
        {"filled": ((1, 3),)},
        {"filled": ()},
    ],
    ids=str,
)
def test_every_decision_is_in_the_digest(change: dict[str, object]) -> None:
    assert plan_digest(PLAN) == plan_digest(dataclasses.replace(PLAN))
    assert plan_digest(dataclasses.replace(PLAN, **change)) != plan_digest(PLAN)


def test_a_digest_tells_new_blocks_from_filled_ones() -> None:
    """Both are lists of small integers; without their lengths they could stand for each other."""
    blocks = StepPlan(0, new_blocks=((1, (5,)), (7, (2,))))
    filled = StepPlan(0, filled=((1, 1), (5, 7), (1, 2)))
    assert plan_digest(blocks) != plan_digest(filled)


def test_digests_fit_a_signed_64_bit_column() -> None:
    values = digests()
    assert all(-(2**63) <= value < 2**63 for value in values)
    assert min(values) < 0 < max(values)
