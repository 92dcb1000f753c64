"""What a server tells of swaps: how much was copied, who is away, and in how many blocks of host memory."""

import asyncio

import pytest
from engine_models import prompts, small_limits
from engine_serving import run
from prometheus_client.parser import text_string_to_metric_families
from server_apps import Running, running

from pagedserve.metrics.record import RunRecord
from pagedserve.policy import policy

COMPLETIONS = "/v1/completions"


async def _samples(served: Running, name: str) -> list[tuple[dict[str, str], float]]:
    """Labels and values of one metric's samples."""
    async with served.client() as http:
        text = (await http.get("/metrics")).text
    families = text_string_to_metric_families(text)
    return [(s.labels, s.value) for family in families for s in family.samples if s.name == name]


@pytest.mark.parametrize("depth", [0, 1])
def test_swaps_are_counted_and_host_blocks_told(depth: int) -> None:
    """Against the record; and while somebody is swapped out, how many and in how many blocks."""

    async def main(served: Running) -> tuple[dict[str, float], RunRecord]:
        scheduler = served.engine.scheduler
        served.gate.close()
        talks = [
            served.talk(COMPLETIONS, {"prompt": list(prompt), "max_tokens": 30, "ignore_eos": True})
            for prompt in prompts(12, 4)
        ]
        await served.until(lambda: len(served.engine._live) == len(talks))
        while not scheduler.host.num_used_blocks:
            done = served.front.backend.stats().counts.num_steps
            served.gate.steps(1)
            await served.until(lambda done=done: served.front.backend.stats().counts.num_steps > done)
        away = [state for state in scheduler.states.values() if state.host_blocks]
        for name, value in (
            ("requests_swapped", len(away)),
            ("cpu_kv_blocks_used", sum(len(state.host_blocks) for state in away)),
        ):
            assert [found for _, found in await _samples(served, f"pagedserve:{name}")] == [value]
            assert value > 0
        served.gate.open()
        await asyncio.gather(*(talk.task for talk in talks))
        await served.at_rest()
        counters: dict[str, float] = {}
        for way in ("out", "in"):
            ((_, counters[way]),) = await _samples(served, f"pagedserve:kv_blocks_swapped_{way}_total")
        ((_, left),) = await _samples(served, "pagedserve:cpu_kv_blocks_used")
        assert left == 0
        return counters, await served.served.record()

    spec = policy("mixed", preemption_mode="swap", watermark=0.0)
    with running(spec, small_limits(num_blocks=26, num_cpu_blocks=40), depth) as served:
        counters, record = run(main(served))
    for way, count in counters.items():
        assert count == sum(record.array("steps", f"num_blocks_swapped_{way}").tolist()) > 0
