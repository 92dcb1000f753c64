"""Load on a real server process: what its clients see, what /metrics says, and what serving itself costs.

Closed loops keep so many streams open; open loops send at a rate (Poisson), whatever became of those before.
Each level prints output tokens/s beside time to first token, inter-token latency and request latency, from the
client and from the server; KV occupancy and waste, asked for once a second; preemptions; the front end's CPU
time (event loop and tokenizer) as a share of the engine's; and with --probe how long /health took meanwhile,
beside an empty uvicorn app in a process of its own (some hundred probes a second are a load of their own).

    python benchmarks/serve_load.py --model smollm2-135m --concurrency 1 8 32 --rates 2
"""

import argparse
import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx2
import numpy as np
import pandas as pd
from served_process import Scraped, Served, served

from pagedserve.validation.http_client import CompletionsClient, completion_body
from pagedserve.validation.http_replay import send_all
from pagedserve.validation.http_stream import Reply

EMPTY_APP = """
import sys, uvicorn
async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})
uvicorn.run(app, port=int(sys.argv[1]), lifespan="off", log_config=None, access_log=False)
"""


@dataclass(frozen=True, slots=True)
class Level:
    """One load: ``concurrency`` streams at once, or ``rate`` requests a second."""

    concurrency: int | None
    rate: float | None
    bodies: list[bytes]

    @property
    def name(self) -> str:
        """How the table calls it."""
        return f"{self.concurrency} streams" if self.concurrency else f"{self.rate:g} requests/s"


async def closed_loop(client: CompletionsClient, bodies: Sequence[bytes], concurrency: int) -> list[Reply]:
    """``concurrency`` clients, each sending its next request when its last has ended."""
    waiting, replies = iter(bodies), list[Reply]()

    async def one() -> None:
        for body in waiting:
            replies.append(await client.complete(body))

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(one())
    return replies


async def load(url: str, level: Level) -> list[Reply]:
    """Everything of a level, sent and answered."""
    async with CompletionsClient(url, clock=time.monotonic_ns) as client:
        if level.concurrency is not None:
            return await closed_loop(client, level.bodies, level.concurrency)
        assert level.rate is not None
        gaps_s = np.random.default_rng(0).exponential(1 / level.rate, len(level.bodies))
        _, replies = await send_all(
            client, level.bodies, (np.cumsum(gaps_s) * 1e9).astype(int).tolist(), time.monotonic_ns
        )
        return replies


def requests(model: str, count: int, prompt: int, output: int, vocab: int, seed: int) -> list[bytes]:
    """Bodies of greedy streams with prompts of random ids, each its own."""
    prompts = np.random.default_rng(seed).integers(vocab // 10, vocab * 9 // 10, (count, prompt)).tolist()
    return [completion_body(model, ids, output) for ids in prompts]


async def gauges(server: Served, rows: list[tuple[float, float]], block_size: int) -> None:
    """Once a second, occupancy and waste: the share of used slots that hold no token."""
    while True:
        found = await asyncio.to_thread(server.metrics)
        used = found["pagedserve:kv_blocks_used", ()]
        wasted = found["pagedserve:kv_wasted_slots", ()] / (used * block_size) if used else float("nan")
        rows.append((found["vllm:kv_cache_usage_perc", ()], wasted))
        await asyncio.sleep(1)


def measured(server: Served, level: Level, probed: Sequence[str]) -> dict[str, float | str]:
    """Run one level; a row of the table."""
    before, cpu_before = server.metrics(), server.cpu_s()
    info = next(dict(labels) for name, labels in before if name == "vllm:cache_config_info")
    rows: list[tuple[float, float]] = []

    async def both() -> list[Reply]:
        watching = asyncio.create_task(gauges(server, rows, int(info["block_size"])))
        replies = await load(server.url, level)
        watching.cancel()
        return replies

    with probing(probed) as probes:
        replies = asyncio.run(both())
    cpu = {part: spent - cpu_before.get(part, 0.0) for part, spent in server.cpu_s().items()}
    scraped = Scraped(before, server.metrics())
    failed = [reply.error for reply in replies if reply.error is not None]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(replies)} requests failed, the first: {failed[0]}")
    return {
        "load": level.name,
        **client_side(replies),
        **server_side(scraped),
        "occupancy": float(np.mean([occupied for occupied, _ in rows])),
        "waste": float(np.nanmean([wasted for _, wasted in rows])),
        "preemptions": scraped.counter("vllm:num_preemptions_total"),
        "front_cpu_s": cpu["front"],
        "engine_cpu_s": cpu["engine"],
        "other_cpu_s": cpu.get("other", 0.0),
        "front/engine": cpu["front"] / cpu["engine"],
        **{f"health {name}": found for name, found in probes.items()},
    }


def client_side(replies: Sequence[Reply]) -> dict[str, float]:
    """Seconds from the sending of a request; percentiles over requests, of ITL over all gaps."""
    tokens_ns = [np.repeat(*map(np.array, zip(*reply.arrivals, strict=True))) for reply in replies]
    start_ns, end_ns = min(reply.sent_ns for reply in replies), max(times[-1] for times in tokens_ns)
    ttft = np.array([times[0] - reply.sent_ns for times, reply in zip(tokens_ns, replies, strict=True)]) / 1e9
    e2e = np.array([times[-1] - reply.sent_ns for times, reply in zip(tokens_ns, replies, strict=True)]) / 1e9
    itl = np.concatenate([np.diff(times) for times in tokens_ns]) / 1e9
    found = {"tokens/s": sum(map(len, tokens_ns)) / ((end_ns - start_ns) / 1e9)}
    for name, values in (("ttft", ttft), ("itl", itl), ("e2e", e2e)):
        found |= {f"{name} mean": float(np.mean(values)), f"{name} p50": float(np.median(values))}
        found[f"{name} p99"] = float(np.percentile(values, 99))
    return found


def server_side(scraped: Scraped) -> dict[str, float]:
    """The same from /metrics; means are exact, quantiles as fine as the buckets."""
    found: dict[str, float] = {}
    for short, name in (
        ("ttft", "time_to_first_token"),
        ("itl", "inter_token_latency"),
        ("e2e", "e2e_request_latency"),
    ):
        found[f"{short} mean, server"] = scraped.mean_s(f"vllm:{name}_seconds")
        found[f"{short} p50, server"] = scraped.quantile_s(f"vllm:{name}_seconds", 0.5)
        found[f"{short} p99, server"] = scraped.quantile_s(f"vllm:{name}_seconds", 0.99)
    return found


@contextlib.contextmanager
def probing(urls: Sequence[str]) -> Iterator[dict[str, str]]:
    """Probes of each URL by a process of its own until the block ends; what they found is there afterwards."""
    found: dict[str, str] = {}
    if not urls:
        yield found
        return
    with tempfile.TemporaryDirectory() as folder:
        stop, script = Path(folder) / "stop", Path(__file__).with_name("health_probes.py")
        command = [sys.executable, str(script), *urls, "--probes", "100000", "--until", str(stop)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            yield found
        finally:
            stop.touch()
            said, _ = process.communicate(timeout=60)
    for name, own in zip(("server", "empty app"), json.loads(said).values(), strict=True):
        found[name] = f"{own['p50_ms']:.1f}, {own['p99_ms']:.1f} of {own['probes']}"


@contextlib.contextmanager
def empty_app() -> Iterator[str]:
    """An app that does nothing, in a process beside the server; its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-c", EMPTY_APP, str(port)])
    try:
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/"
    finally:
        process.terminate()
        process.wait()


def large_prompt(server: Served, empty: str, num_tokens: int) -> None:
    """Probe while a text of at least so many tokens is tokenised and refused, time after time for some seconds."""
    words = [f" {number * 7919 % 99991}" for number in range(num_tokens)]
    body, took_s, answer = {"prompt": "".join(words)[:num_tokens], "max_tokens": 1}, list[float](), ""
    with probing([f"{server.url}/health", empty]) as probes:
        for _ in range(75):
            start = time.monotonic()
            response = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=60, trust_env=False)
            took_s.append(time.monotonic() - start)
            answer = f"{response.status_code}: {response.text[:160]}"
    print(f"\na prompt of {num_tokens:,} characters, 75 times: {np.median(took_s):.2f} s each, {answer}")
    for name, found in probes.items():
        print(f"  {name}: p50, p99 {found} ms")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--rates", type=float, nargs="*", default=[], help="requests/s")
    parser.add_argument(
        "--requests", type=int, default=4, help="a stream in closed loops; times 8 in open ones"
    )
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens of each request")
    parser.add_argument("--output", type=int, default=64, help="output tokens of each request")
    parser.add_argument("--vocab", type=int, default=49152, help="ids that prompts may have")
    parser.add_argument("--probe", action="store_true", help="ask for /health all the time")
    parser.add_argument(
        "--large-prompt", type=int, default=0, help="characters; also probe while one so long is refused"
    )
    parser.add_argument("server", nargs="*", help="options of `pagedserve serve`, behind --")
    options = parser.parse_args()

    def level(index: int, concurrency: int | None, rate: float | None) -> Level:
        count = options.requests * (concurrency or 8)
        sizes = count, options.prompt, options.output, options.vocab
        return Level(concurrency, rate, requests("served", *sizes, seed=index))

    asked = [(number, None) for number in options.concurrency] + [(None, rate) for rate in options.rates]
    arguments = ["--model", options.model, "--served-model-name", "served", *options.server]
    with served(arguments) as server, empty_app() as empty:
        asyncio.run(load(server.url, level(99, 2, None)))  # warms up both sides
        probed = [f"{server.url}/health", empty] if options.probe else []
        rows = [measured(server, level(index, *each), probed) for index, each in enumerate(asked)]
        if options.large_prompt:
            large_prompt(server, empty, options.large_prompt)
    table = pd.DataFrame(rows, columns=None if rows else ["load"]).set_index("load").T
    print(table.to_string(float_format=lambda value: f"{value:.4g}"))


if __name__ == "__main__":
    main()
