"""Replays a trace against an OpenAI-compatible server: open loop on the wall clock, recorded as a client sees it."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

import numpy as np

import pagedserve
from pagedserve.metrics.record import RunRecord, build_table
from pagedserve.metrics.record_tables import FORMAT_VERSION, TABLES, UNSEEN
from pagedserve.metrics.tokens import FINISHED
from pagedserve.traces.trace import Trace
from pagedserve.validation.http_client import CompletionsClient, completion_body
from pagedserve.validation.http_stream import Reply

WATCH_NS = 5_000_000
Prompts = Sequence[Sequence[int]] | Callable[[int], Sequence[int]]
Progress = Callable[[int, int], None]


def replay_url(
    trace: Trace,
    url: str,
    *,
    prompts: Prompts,
    model: str | None = None,
    api_key: str | None = None,
    timeout_s: float | None = None,
    extensions: bool = True,
    progress: Progress | None = None,
    clock: Callable[[], int] = time.monotonic_ns,
) -> RunRecord:
    """Send every request of ``trace`` at its planned arrival, whatever became of those before, and wait for all.

    ``url``: the server's address, with or without ``/v1``. ``prompts``: token ids by position in the trace, as
    long as the trace says. Each request asks for its true output length. ``model``: by default the first one
    the server lists. ``timeout_s`` bounds each request. ``extensions``: see `completion_body`.
    ``progress(num_ended, num_requests)`` is called as requests end.

    In the record (kind "client") times are the trace's: the first request is due, and sent, at its arrival.
    ``arrival_ns`` is when a request was taken up, from where opening a connection counts as its latency. A
    token's time is when its chunk was received, and all tokens in one chunk have one. A request that fails in
    any way has its row with reason "error", the tokens that came and what happened; the others go on.

    The header's counters say how late requests were sent and for how long this process was too busy to see
    what arrived (``client_stall``: one core takes some thousand chunks and a few hundred new requests a
    second); for how many replies the server did not state the tokens of a chunk (see `token_counts`); and how
    many finished with another length than the trace's. Every prompt is encoded before the first request is
    sent: about 7 bytes a token.

    Raises `ServerError` where the server cannot be reached or refuses the model, ValueError for an empty
    trace and for prompts that are not as the trace says.
    """
    if not len(trace):
        raise ValueError(f"trace {trace.name!r} has no requests to send")
    if isinstance(prompts, Sequence) and len(prompts) != len(trace):
        raise ValueError(f"{len(prompts)} prompts for a trace of {len(trace)} requests")
    lengths = trace.num_output_tokens.tolist()

    async def run() -> RunRecord:
        async with CompletionsClient(url, clock=clock, api_key=api_key, timeout_s=timeout_s) as client:
            name = await client.choose_model(model, _prompt(trace, prompts, 0))
            bodies = [
                completion_body(name, _prompt(trace, prompts, index), length, extensions=extensions)
                for index, length in enumerate(lengths)
            ]
            stalls_ns: list[int] = []
            watch = asyncio.create_task(watch_stalls(stalls_ns, clock))
            start_ns, replies = await send_all(client, bodies, trace.arrival_ns.tolist(), clock, progress)
            watch.cancel()
            return client_record(trace, client.url, name, start_ns, replies, stalls_ns)

    return _run(run())


async def send_all(
    client: CompletionsClient,
    bodies: Sequence[bytes],
    due_ns: Sequence[int],
    clock: Callable[[], int],
    progress: Progress | None = None,
) -> tuple[int, list[Reply]]:
    """Send body i when ``due_ns[i]`` comes (non-decreasing), the first at once; replies in the order of bodies.

    Returned before them: the clock's time at which time 0 of ``due_ns`` was or would have been.
    """
    num_ended = 0

    async def send(body: bytes) -> Reply:
        nonlocal num_ended
        reply = await client.complete(body)
        num_ended += 1
        if progress is not None:
            progress(num_ended, len(bodies))
        return reply

    start_ns = clock() - due_ns[0]
    async with asyncio.TaskGroup() as group:
        sends: list[asyncio.Task[Reply]] = []
        for body, due in zip(bodies, due_ns, strict=True):
            while (wait_ns := start_ns + due - clock()) > 0:
                await asyncio.sleep(wait_ns / 1e9)
            sends.append(group.create_task(send(body)))
    return start_ns, [task.result() for task in sends]


async def watch_stalls(stalls_ns: list[int], clock: Callable[[], int]) -> None:
    """Append by how much each pause of ``WATCH_NS`` lasted longer: so late may an arrival be seen."""
    while True:
        due_ns = clock() + WATCH_NS
        await asyncio.sleep(WATCH_NS / 1e9)
        stalls_ns.append(max(clock() - due_ns, 0))


def client_record(
    trace: Trace,
    url: str,
    model: str,
    start_ns: int,
    replies: Sequence[Reply],
    stalls_ns: Sequence[int] = (),
) -> RunRecord:
    """The record of what a client saw of each request.

    ``start_ns`` is the clock's time at the trace's time 0; ``stalls_ns`` are those of `watch_stalls`.
    """
    arrived = [np.array([at for at, _ in reply.arrivals], np.int64) - start_ns for reply in replies]
    counts = [np.array([count for _, count in reply.arrivals], np.int64) for reply in replies]
    instants = np.unique(np.concatenate(arrived))
    steps: dict[str, Any] = dict.fromkeys(UNSEEN["steps"], [None] * instants.size)
    steps |= {"step": np.arange(instants.size), "commit_ns": instants}
    owners = np.repeat(np.arange(len(replies)), [reply.num_tokens for reply in replies])
    # Runs of one token: what comes in one chunk comes at one instant, which no longer run can say.
    emitted = np.repeat(np.searchsorted(instants, np.concatenate(arrived)), np.concatenate(counts))
    emissions = {"request": owners, "first_step": emitted, "num_steps": np.ones(owners.size, np.int64)}
    return RunRecord(
        header=_header(trace, url, model, _counters(trace, start_ns, replies, stalls_ns)),
        steps=build_table("steps", steps, is_client=True),
        requests=build_table("requests", _request_columns(trace, start_ns, replies), is_client=True),
        emissions=build_table("emissions", emissions),
        calls=build_table("calls", {column.name: [] for column in TABLES["calls"]}),
    )


def _request_columns(trace: Trace, start_ns: int, replies: Sequence[Reply]) -> dict[str, Any]:
    num_requests = len(replies)
    columns: dict[str, Any] = {column.name: [None] * num_requests for column in TABLES["requests"]}
    return columns | {
        "request": np.arange(num_requests),
        "due_ns": trace.arrival_ns,
        "arrival_ns": [reply.sent_ns - start_ns for reply in replies],
        "num_prompt_tokens": trace.num_prompt_tokens,
        "max_tokens": trace.num_output_tokens,
        "num_output_tokens": [reply.num_tokens for reply in replies],
        "finish_reason": [reply.finish_reason for reply in replies],
        "finish_ns": [reply.end_ns - start_ns for reply in replies],
        "num_prefix_hit_tokens": [reply.num_cached_tokens for reply in replies],
        "priority": np.zeros(num_requests, np.int32) if trace.priority is None else trace.priority,
        "tenant": [""] * num_requests if trace.tenant is None else trace.tenant.tolist(),
        "error": [reply.error for reply in replies],
    }


def _header(trace: Trace, url: str, model: str, counters: dict[str, int]) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "kind": "client",
        "policy": {"name": "the server's own"},
        "limits": {},
        "overlap_depth": None,
        "seed": 0,
        "device": {"name": f"{model} at {url}", "url": url, "model": model},
        "cost": None,
        "trace": {"name": trace.name, "sha256": trace.sha256(), "num_requests": len(trace)},
        "versions": {"pagedserve": pagedserve.__version__, "httpx2": version("httpx2")},
        "counters": counters,
    }


def _counters(
    trace: Trace, start_ns: int, replies: Sequence[Reply], stalls_ns: Sequence[int]
) -> dict[str, int]:
    """How well the client kept to the plan, and how much of the record is stated rather than inferred."""
    lag = [
        reply.sent_ns - start_ns - due for reply, due in zip(replies, trace.arrival_ns.tolist(), strict=True)
    ]
    wanted = zip(replies, trace.num_output_tokens.tolist(), strict=True)
    return {
        "send_lag_p50_ns": round(float(np.median(lag))),
        "send_lag_max_ns": max(lag),
        "client_stall_p50_ns": round(float(np.median(stalls_ns or [0]))),
        "client_stall_max_ns": max(stalls_ns, default=0),
        "num_failed": sum(reply.error is not None for reply in replies),
        "num_chunks": sum(len(reply.arrivals) for reply in replies),
        "num_usage_tokens": sum(reply.num_usage_tokens or 0 for reply in replies),
        "num_requests_spread": sum(reply.counting == "spread" for reply in replies),
        "num_requests_assumed": sum(reply.counting == "assumed" for reply in replies),
        "num_other_lengths": sum(
            reply.finish_reason in FINISHED and reply.num_tokens != length for reply, length in wanted
        ),
    }


def _prompt(trace: Trace, prompts: Prompts, index: int) -> list[int]:
    prompt = np.asarray(prompts(index) if callable(prompts) else prompts[index]).tolist()
    wanted = int(trace.num_prompt_tokens[index])
    if len(prompt) != wanted:
        raise ValueError(f"the prompt of request {index} has {len(prompt)} tokens; the trace says {wanted}")
    return prompt


def _run(work: Coroutine[Any, Any, RunRecord]) -> RunRecord:
    """Run to the end, in a thread of its own where this one has an event loop already, as notebooks do."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()
