"""Planted faults: the driver, the ledger and ``check()`` can fail, and say what is off."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from policy_driver import Drive
from policy_scripts import scripted

from pagedserve.policy import IllegalPlan, Limits, Outcome, RequestState, Status, StepPlan, policy

FAMILY = {"family": 1, "shared": 12, "block_size": 2}
LIMITS = Limits(8, 3, max_model_len=32, block_size=2, num_blocks=8)


@pytest.mark.parametrize("early", [None, 1])
def test_blocks_freed_before_their_fence_are_found_out(early: int | None) -> None:
    """Without quarantine, or with one that ends a step early: whoever gets the block first tells."""
    drive = Drive(policy("mixed", watermark=0.0), Limits(8, 3, 32, block_size=2, num_blocks=5), 1)
    release = drive.scheduler.allocator.release

    def faulty(state: RequestState, fence: int | None) -> None:
        release(state, None if fence is None or early is None or fence == 0 else fence - early)

    drive.scheduler.allocator.release = faulty
    with pytest.raises((IllegalPlan, AssertionError), match=r"in flight"):
        drive.run([scripted(i, 5, 6, arrival_ns=i, stop_after=2) for i in range(6)])


def test_blocks_published_before_the_commit_are_found_out() -> None:
    """CASES B9: the fault of publishing at planning time."""
    drive = Drive(policy("vllm_v1"), Limits(8, 3, 32, block_size=2, num_blocks=16), 1)
    schedule = drive.scheduler.schedule

    def faulty(now_ns: int) -> StepPlan:
        plan = schedule(now_ns)
        for chunk in plan.chunks:
            keys = drive.states[chunk.request].request.prefix_keys or ()
            full = (chunk.start + chunk.num_tokens) // 2
            blocks = drive.states[chunk.request].block_table[: min(full, len(keys))]
            drive.scheduler.allocator.publish(blocks, keys[: len(blocks)])
        return plan

    drive.scheduler.schedule = faulty
    with pytest.raises(AssertionError, match="not committed"):
        drive.run(
            [
                scripted(0, 8, 6, **FAMILY),
                scripted(1, 9, 6, arrival_ns=5, **FAMILY),
                scripted(2, 9, 1, **FAMILY),
            ]
        )


def test_a_lost_stop_is_found_out() -> None:
    drive = Drive(policy("mixed"), LIMITS)
    commit = drive.scheduler.commit

    def faulty(step: int, outcomes: Iterable[Outcome], now_ns: int) -> list[Any]:
        return list(commit(step, [], now_ns))

    drive.scheduler.commit = faulty
    with pytest.raises(AssertionError, match="ends"):
        drive.run([scripted(0, 3, 6, stop_after=2)])


def running_drive(allocator: str) -> Drive:
    """Two requests that decode and one that waits."""
    drive = Drive(policy("mixed", allocator=allocator), Limits(8, 2, 16, block_size=2, num_blocks=16))
    for i in range(3):
        drive.add(scripted(i, 3, 6))
    for _ in range(2):
        drive.schedule()
        drive.commit()
    drive.schedule()
    return drive


def _skew(name: str) -> Callable[[Drive], None]:
    def fault(drive: Drive) -> None:
        allocator = drive.scheduler.allocator
        setattr(allocator, name, getattr(allocator, name) + 1)

    return fault


def _lose_block(drive: Drive) -> None:
    drive.states[0].block_table.pop()


def _share_block(drive: Drive) -> None:
    drive.states[0].block_table[-1] = drive.states[1].block_table[-1]


def _finish(drive: Drive) -> None:
    drive.states[0].move(Status.FINISHED)


def _double_free(drive: Drive) -> None:
    table = list(drive.states[0].block_table)
    drive.scheduler.allocator.release(drive.states[0], None)
    drive.states[0].block_table = table


FAULTS: dict[str, Callable[[Drive], None]] = {
    "live tokens": _skew("num_live_tokens"),
    "free blocks": _skew("num_free_blocks"),
    "quarantined blocks": _skew("num_quarantined_blocks"),
    "a block is lost from a table": _lose_block,
    "a block is in two tables": _share_block,
    "a running request is marked finished": _finish,
    "blocks are freed under a request": _double_free,
}


@pytest.mark.parametrize("allocator", ["paged", "contiguous_max", "contiguous_limit"])
@pytest.mark.parametrize("name", FAULTS)
def test_check_fails_on_each_planted_fault(name: str, allocator: str) -> None:
    drive = running_drive(allocator)
    drive.scheduler.check()
    FAULTS[name](drive)
    with pytest.raises(AssertionError):
        drive.scheduler.check()
