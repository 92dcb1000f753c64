"""Many clients at several times the server's capacity, a fifth of which leave: nothing breaks, leaks or is lost."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_apps import save_tiny
from server_processes import SLOW, Server, get, served
from soak_client import LEFT, MAX_BODY_BYTES, MAX_MODEL_LEN, NO_HTTP, CrowdState, crowd, plans

NUM_BLOCKS = 20
AT_ONCE = 96
OPTIONS: dict[str, Any] = {
    # In bfloat16 the CPU's library keeps compiled products of the last 1024 shapes, which takes a while to fill.
    "--dtype": "float32",
    "--max-num-seqs": 8,
    "--num-blocks": NUM_BLOCKS,
    "--max-model-len": MAX_MODEL_LEN,
    "--max-num-batched-tokens": 64,
    "--max-num-queued-reqs": 88,
    "--max-body-bytes": MAX_BODY_BYTES,
    "--request-timeout": 1.2,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


def rss_bytes(server: Server) -> int:
    pages = Path(f"/proc/{server.process.pid}/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def totals(server: Server) -> Counter[Any]:
    """Every sample of /metrics, by name, and by name and the value of each of its labels."""
    found: Counter[Any] = Counter()
    for family in text_string_to_metric_families(get(server.url, "/metrics").text):
        for sample in family.samples:
            value = int(sample.value)
            found[sample.name] += value
            for label in sample.labels.values():
                found[sample.name, label] += value
    return found


def soak(server: Server, count: int, seed: int) -> tuple[CrowdState, list[int]]:
    """What became of ``count`` clients, and the server's memory after every hundredth of them."""
    host, port = server.url.removeprefix("http://").split(":")
    memory: list[int] = []

    def ended(number: int) -> None:
        if number % (count // 100) == 0:
            memory.append(rss_bytes(server))

    work = crowd((host, int(port)), plans(count, seed), AT_ONCE, ended)
    return asyncio.run(work), memory


def check_at_rest(server: Server, count: int, state: CrowdState) -> None:
    """CASES A5 and H2 from /metrics, and the clients' own books against the server's."""
    while totals(server)["pagedserve:requests_open"] or totals(server)["vllm:num_requests_running"]:
        time.sleep(0.01)
    seen = totals(server)
    for gauge in ("vllm:num_requests_running", "vllm:num_requests_waiting", "pagedserve:queued_requests"):
        assert seen[gauge] == 0, gauge
    assert seen["pagedserve:queued_tokens"] == seen["pagedserve:kv_blocks_used"] == 0
    assert seen["pagedserve:kv_blocks_free"] + seen["pagedserve:kv_blocks_cached"] == NUM_BLOCKS
    assert seen["pagedserve:requests_accepted_total"] == seen["vllm:request_success_total"]
    assert seen["vllm:e2e_request_latency_seconds_count"] == seen["vllm:time_to_first_token_seconds_count"]
    assert sum(state.outcomes.values()) == count
    answers = "pagedserve:http_responses_total"
    num_unseen = 0
    for status, told in state.outcomes.items():
        if isinstance(status, int):
            # /metrics was asked by this test; its answer counts itself.
            of_ours = seen[answers, "/metrics"] if status == 200 else 0
            num_unseen += seen[answers, str(status)] - of_ours - told
            assert seen[answers, str(status)] - of_ours >= told, (status, state.outcomes)
    assert num_unseen <= state.outcomes[LEFT], "answers that nobody waited for, and nobody had left"
    for reason in ("stop", "length", "abort", "timeout"):
        assert seen["vllm:request_success_total", reason], f"no request ended by {reason}"
    assert not seen["vllm:request_success_total", "error"]
    assert set(state.outcomes) >= {200, 400, 413, 503, 504, LEFT, NO_HTTP}
    assert seen["vllm:num_preemptions_total"], "the pool was never too small"
    assert "Traceback" not in server.said


@pytest.mark.parametrize(
    "count", [pytest.param(600, id="some"), pytest.param(10_000, id="many", marks=pytest.mark.long)]
)
@pytest.mark.timeout(900)
def test_a_crowd_several_times_the_capacity(model: Path, count: int) -> None:
    arguments = [part for option in OPTIONS.items() for part in option]
    # Steps that take at least 5 ms: on any machine the crowd is too much, and some requests take too long.
    with served(model, *arguments, before=SLOW.replace("0.02", "0.005")) as server:
        server.wait()
        start = time.monotonic()
        state, memory = soak(server, count, seed=count)
        print(f"{count} requests in {time.monotonic() - start:.0f} s: {dict(state.outcomes)}")
        print(f"{dict(state.finish_reasons)}; RSS in MiB: {[size >> 20 for size in memory[::10]]}")
        check_at_rest(server, count, state)
        if count >= 10_000:
            middle, end = median(memory[45:55]), median(memory[-10:])
            assert end <= 1.02 * middle, f"memory grew from {middle:,.0f} to {end:,.0f} bytes"
        server.process.terminate()
        assert server.end() == 0
