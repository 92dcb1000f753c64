"""Metrics: exact against the record of the same run, adding up, and on vLLM's names and buckets."""

import asyncio
import math
import random
from collections import Counter
from typing import Any

import pytest
from engine_models import prompts, small_limits
from engine_serving import run
from prometheus_client.parser import text_string_to_metric_families
from server_apps import MODEL, Running, running

from pagedserve.engine.server.histograms import ITL_S, PHASE_S, TTFT_S, HistogramState, one_two_five
from pagedserve.metrics.tokens import inter_token_s, token_times

COMPLETIONS = "/v1/completions"
VLLM_ITL_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
VLLM_NAMES = (
    *(
        "admission_rejections",
        "cache_config_info",
        "e2e_request_latency_seconds",
        "generation_tokens",
    ),
    *(
        "inter_token_latency_seconds",
        "iteration_tokens_total",
        "kv_cache_usage_perc",
        "num_preemptions",
    ),
    *(
        "num_requests_running",
        "num_requests_waiting",
        "prefix_cache_hits",
        "prefix_cache_queries",
    ),
    *(
        "prompt_tokens",
        "prompt_tokens_cached",
        "request_decode_time_seconds",
        "request_generation_tokens",
    ),
    *(
        "request_inference_time_seconds",
        "request_max_num_generation_tokens",
        "request_num_preemptions",
    ),
    *(
        "request_params_max_tokens",
        "request_params_n",
        "request_prefill_time_seconds",
    ),
    *(
        "request_prompt_tokens",
        "request_queue_time_seconds",
        "request_success",
    ),
    *(
        "request_time_per_output_token_seconds",
        "time_to_first_token_seconds",
    ),
)
OUR_NAMES = (
    *(
        "kv_blocks_cached",
        "kv_blocks_free",
        "kv_blocks_used",
        "kv_wasted_slots",
    ),
)


async def _scrape(served: Running) -> dict[str, float]:
    """Sample name, with the label that matters if any, to value."""
    async with served.client() as http:
        text = (await http.get("/metrics")).text
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            own = [sample.labels[key] for key in ("finished_reason", "reason", "le") if key in sample.labels]
            values[":".join([sample.name, *own])] = sample.value
    return values


async def _random_work(served: Running, count: int, seed: int) -> Counter[str]:
    """Requests at random moments; some leave, some are wrong. Statuses, "left" for those that left."""
    rng, ends = random.Random(seed), Counter[str]()

    async def one(prompt: tuple[int, ...]) -> None:
        await asyncio.sleep(rng.random() * 0.3)
        body = {"prompt": list(prompt), "max_tokens": rng.randint(1, 40), "n": rng.choice((1, 1, 1, 2))}
        body |= {"stream": rng.random() < 0.5, "ignore_eos": rng.random() < 0.5, "seed": 1}
        if rng.random() < 0.1:
            body["prompt"] = [-1]
        talk = served.talk(COMPLETIONS, body)
        if rng.random() < 0.25:
            await asyncio.sleep(rng.random() * 0.1)
            talk.leave()
        await talk.task
        ends[str(talk.status or "left")] += 1

    await asyncio.gather(*(one(prompt) for prompt in prompts(count, seed)))
    await served.at_rest()
    return ends


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("policy", ["vllm_v1", "prefill_first", "static"])
def test_counts_are_those_of_the_record(policy: str, depth: int) -> None:
    """Under preemption, aborts, and tokens that are discarded: gap for gap, token for token."""

    async def main(served: Running) -> Any:
        await _random_work(served, 40, 3)
        return served.front.backend.stats().counts, await served.served.record()

    with running(policy, small_limits(num_blocks=26), depth) as served:
        counts, record = run(main(served))
    gaps = inter_token_s(token_times(record))
    expected = HistogramState(ITL_S)
    for gap in gaps:
        expected.observe(float(gap))
    assert counts.itl.counts == expected.counts
    assert counts.itl.total == pytest.approx(float(gaps.sum()), rel=1e-9)
    requests = record.requests.to_pandas()
    assert counts.num_generated_tokens == requests["num_output_tokens"].sum()
    ended = requests[requests["finish_reason"].isin(["stop", "length"])]
    reasons = Counter(requests["finish_reason"].to_list())
    assert counts.finished == {k: v for k, v in reasons.items() if k != "refused"}
    begun = requests[requests["num_output_tokens"] > 0]
    assert counts.num_prompt_tokens == begun["num_prompt_tokens"].sum()
    assert counts.num_cached_prompt_tokens == begun["num_prefix_hit_tokens"].sum()
    assert counts.num_preemptions == record.steps["num_preemptions"].to_numpy().sum()
    assert counts.num_recomputed_tokens == record.steps["num_recomputed_tokens"].to_numpy().sum()
    assert counts.num_discarded_tokens == record.steps["num_discarded_tokens"].to_numpy().sum()
    assert counts.inference.count == counts.queue.count == len(ended)
    inference = (ended["finish_ns"] - ended["first_schedule_ns"]).sum() / 1e9
    assert counts.inference.total == pytest.approx(inference, rel=1e-9)
    assert counts.prefill.total + counts.decode.total == pytest.approx(inference, rel=1e-9)
    assert counts.iteration_tokens.count == counts.num_steps
    if policy == "vllm_v1":
        assert counts.num_preemptions > 0, "the pool was not small enough"


def test_counters_add_up_and_never_fall() -> None:
    """CASES H2."""

    async def main(served: Running) -> None:
        before = await _scrape(served)
        for seed in (1, 2):
            ends = await _random_work(served, 30, seed)
            after = await _scrape(served)
            assert len(ends) > 1
            for name, value in before.items():
                if "_total" in name or "_count" in name or "_bucket" in name:
                    assert after[name] >= value, name
            before = after
        ended = {k: v for k, v in before.items() if k.startswith("vllm:request_success_total")}
        assert sum(ended.values()) == before["pagedserve:requests_accepted_total"] > 30
        assert before["pagedserve:requests_open"] == before["pagedserve:queued_requests"] == 0
        assert before["vllm:num_requests_running"] == before["vllm:num_requests_waiting"] == 0
        assert before["vllm:kv_cache_usage_perc"] == before["pagedserve:kv_wasted_slots"] == 0
        blocks = sum(before[f"pagedserve:kv_blocks_{kind}"] for kind in ("used", "cached", "free"))
        assert blocks == served.engine.limits.num_blocks

    with running() as served:
        run(main(served))


def test_a_request_of_several_samples_counts_once() -> None:
    async def main(served: Running) -> dict[str, float]:
        await served.complete(prompt="abc", n=3, max_tokens=5)
        return await _scrape(served)

    with running() as served:
        values = run(main(served))
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_params_n"):
        assert values[f"vllm:{name}_count"] == 1
    assert values["vllm:request_success_total:length"] == values["vllm:request_params_n_bucket:5.0"] == 1
    assert values["vllm:request_generation_tokens_sum"] == values["vllm:generation_tokens_total"] == 15
    assert values["vllm:request_max_num_generation_tokens_sum"] == 5
    assert values["vllm:inter_token_latency_seconds_count"] == 3 * 4
    assert values["pagedserve:sequences_finished_total:length"] == 3


def test_gauges_show_the_engine_at_work() -> None:
    async def main(served: Running) -> dict[str, float]:
        served.gate.close()
        talks = [
            served.talk(COMPLETIONS, {"prompt": [1] * 6, "max_tokens": 50, "ignore_eos": True}) for _ in "ab"
        ]
        await served.until(lambda: len(served.engine._live) == 2)
        served.gate.steps(3)
        await served.until(lambda: served.front.backend.stats().counts.num_generated_tokens == 3)
        values = await _scrape(served)
        served.gate.open()
        await asyncio.gather(*(talk.task for talk in talks))
        return values

    with running(limits=small_limits(max_num_seqs=1)) as served:
        values = run(main(served))
    assert (values["vllm:num_requests_running"], values["vllm:num_requests_waiting"]) == (1, 1)
    assert values["pagedserve:requests_open"] == 2
    assert values["pagedserve:queued_requests"] == 1, "the other one has its first token"
    assert values["pagedserve:kv_blocks_used"] == 2
    assert values["pagedserve:kv_wasted_slots"] == 0, "six tokens of the prompt and two of the output"
    assert values["vllm:kv_cache_usage_perc"] == 2 / 64


def test_names_labels_and_buckets_are_those_of_vllm() -> None:
    async def main(served: Running) -> str:
        await served.complete(prompt="abc", max_tokens=2)
        async with served.client() as http:
            response = await http.get("/metrics")
            assert response.headers["content-type"].startswith("text/plain")
            return response.text

    with running() as served:
        text = run(main(served))
    families = {family.name: family for family in text_string_to_metric_families(text)}
    wanted = {*(f"vllm:{name}" for name in VLLM_NAMES), *(f"pagedserve:{name}" for name in OUR_NAMES)}
    assert not wanted - families.keys()
    for name, family in families.items():
        if name.startswith("vllm:"):
            for sample in family.samples:
                assert sample.labels["model_name"] == MODEL
                assert (sample.labels["engine"], sample.labels["policy"]) == ("0", "vllm_v1")
    assert set(VLLM_ITL_S) < set(ITL_S)
    for bounds in (ITL_S, TTFT_S, PHASE_S):
        assert list(bounds) == sorted(set(bounds))
        assert len([bound for bound in bounds if bound < 0.01]) == 3, "finer below 10 ms"


def test_a_histogram_counts_as_prometheus_does() -> None:
    """Upper ends are included; the last bucket has none."""
    histogram = HistogramState((1, 2.5, 1_000_000))
    for value, times in ((1, 2), (2, 1), (2.5, 1), (3e6, 1)):
        histogram.observe(value, times)
    assert histogram.cumulative() == [(1, 2), (2.5, 4), (1_000_000, 4), (math.inf, 5)]
    assert (histogram.count, histogram.total) == (5, 3_000_006.5)
    assert one_two_five(500) == (1, 2, 5, 10, 20, 50, 100, 200, 500)
