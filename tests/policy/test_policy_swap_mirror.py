"""The mirror sees copies between device and host that are missing or wrong."""

import dataclasses
from collections.abc import Callable

import pytest
from policy_driver import Drive, swaps_of
from policy_mirror import Mirror
from policy_scripts import crowd

from pagedserve.policy import Limits, StepPlan, Swap, policy

LIMITS = Limits(16, 4, max_model_len=48, block_size=2, num_blocks=9, num_cpu_blocks=24)


def recorded() -> tuple[Drive, list[StepPlan | int]]:
    """A run with swaps at depth 1: its plans and commits in order."""
    drive = Drive(policy("mixed", preemption_mode="swap", watermark=0.0), LIMITS, 1)
    calls: list[StepPlan | int] = []
    apply, commit = drive.mirror.apply, drive.mirror.commit

    def note_apply(plan: StepPlan) -> None:
        calls.append(plan)
        apply(plan)

    def note_commit(step: int, num_keys: dict[int, int]) -> None:
        calls.append(step)
        commit(step, num_keys)

    drive.mirror.apply, drive.mirror.commit = note_apply, note_commit
    drive.run(crowd())
    return drive, calls


def replay(drive: Drive, calls: list[StepPlan | int]) -> None:
    """Show the calls to a fresh mirror."""
    mirror = Mirror(drive.limits, prefix_caching=False)
    mirror.scripts = drive.mirror.scripts
    for call in calls:
        if isinstance(call, StepPlan):
            mirror.apply(call)
        else:
            mirror.commit(call, {})


def _changed(
    way: str, change: Callable[[Swap], Swap | None]
) -> Callable[[StepPlan], dict[str, object] | None]:
    """Change the first copy of a plan, or leave it out."""

    def tamper(plan: StepPlan) -> dict[str, object] | None:
        swaps = getattr(plan, way)
        if not swaps:
            return None
        changed = change(swaps[0])
        if changed == swaps[0]:
            return None
        return {way: (*([] if changed is None else [changed]), *swaps[1:])}

    return tamper


TAMPERINGS = {
    "a copy out is left out": _changed("swapped_out", lambda swap: None),
    "a copy in is left out": _changed("swapped_in", lambda swap: None),
    "a block is not copied out": _changed(
        "swapped_out", lambda s: s._replace(blocks=s.blocks[1:], host_blocks=s.host_blocks[1:])
    ),
    "a block is not copied in": _changed(
        "swapped_in", lambda s: s._replace(blocks=s.blocks[1:], host_blocks=s.host_blocks[1:])
    ),
    "copied out in another order": _changed("swapped_out", lambda s: s._replace(blocks=s.blocks[::-1])),
    "copied in in another order": _changed("swapped_in", lambda s: s._replace(blocks=s.blocks[::-1])),
    "copied in from elsewhere": _changed(
        "swapped_in", lambda s: s._replace(host_blocks=tuple([(h + 1) % 24 for h in s.host_blocks]))
    ),
}


@pytest.mark.parametrize("name", TAMPERINGS)
def test_the_mirror_sees_every_tampering(name: str) -> None:
    drive, calls = recorded()
    replay(drive, calls)
    tried = 0
    for index, call in enumerate(calls):
        change = TAMPERINGS[name](call) if isinstance(call, StepPlan) else None
        if change is None or not isinstance(call, StepPlan):
            continue
        # A copy that nobody wants back, because the request ended, may hold anything.
        later = swaps_of([c for c in calls[index:] if isinstance(c, StepPlan)], "swapped_in")
        wanted = {swap.request for swap in later}
        if call.swapped_out and call.swapped_out[0].request not in wanted:
            continue
        tried += 1
        with pytest.raises((AssertionError, KeyError, IndexError)):
            replay(drive, [*calls[:index], dataclasses.replace(call, **change), *calls[index + 1 :]])
    assert tried
