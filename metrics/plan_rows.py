"""Plans as a record keeps them: a digest of every one, and swaps as flat lists."""

from array import array
from hashlib import blake2b

from pagedserve.policy.plan import StepPlan, Swap


def plan_digest(plan: StepPlan) -> int:
    """A signed 64-bit hash of every decision in a plan, equal in any process."""
    flat = [plan.step or 0, len(plan.decodes), len(plan.new_requests)]
    flat += [request.id for request in plan.new_requests]
    for rows in (plan.chunks, plan.filled):
        flat.append(len(rows))
        for row in rows:
            flat += row
    for ids in (plan.joined, plan.left, plan.preempted, plan.departed):
        flat.append(len(ids))
        flat += ids
    for owner, blocks in plan.new_blocks:
        flat += (owner, len(blocks))
        flat += blocks
    for sign, swaps in ((-1, plan.swapped_out), (-2, plan.swapped_in)):
        for request, blocks, host_blocks in swaps:
            flat += (sign, request, len(blocks), *blocks, *host_blocks)
    return int.from_bytes(blake2b(array("q", flat).tobytes(), digest_size=8).digest(), "little", signed=True)


def swap_columns(way: str, swaps: tuple[Swap, ...]) -> dict[str, list[int]]:
    """The columns of the table ``plans`` for the copies of one ``way``, "out" or "in"."""
    return {
        f"{way}_requests": [swap.request for swap in swaps],
        f"{way}_counts": [len(swap.blocks) for swap in swaps],
        f"{way}_blocks": [block for swap in swaps for block in swap.blocks],
        f"{way}_host_blocks": [block for swap in swaps for block in swap.host_blocks],
    }
