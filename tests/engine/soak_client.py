"""A crowd of well- and ill-behaved clients, on raw sockets, that checks every answer it gets."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MAX_MODEL_LEN = 256
MAX_BODY_BYTES = 20_000
PAUSE_S = 0.2
"""How long a client that is turned away stays away."""
LEFT, NO_HTTP = "left", "no http"
SHARED = "It was the best of times, it was the worst of times, it was the age of wisdom. "
# Few enough texts: the tokenizer keeps the last 10,000 words it has seen, of this one a text is a single word,
# and memory would grow until there are as many.
_ENDINGS = ["".join(random.Random(i).choices("abcdef ", k=i + 1)) for i in range(12)]


@dataclass(frozen=True, slots=True)
class Plan:
    """What one client does: the bytes it sends, what answers are right, and how soon it leaves, if it does."""

    content: bytes
    statuses: frozenset[int]
    num_choices: int = 1
    is_stream: bool = False
    leaves_after_s: float | None = None


@dataclass(slots=True)
class CrowdState:
    """What became of the clients so far: HTTP statuses, and those that left."""

    outcomes: Counter[Any] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)


def plans(count: int, seed: int) -> list[Plan]:
    """20 % leave; of the others 6 % send what is no request, 4 % too much; the rest is small and diverse."""
    rng = random.Random(seed)
    return [_plan(rng) for _ in range(count)]


def _plan(rng: random.Random) -> Plan:
    kind = rng.random()
    leaves = rng.expovariate(1 / 0.3) if kind < 0.2 else None
    if 0.2 <= kind < 0.25:
        return _malformed(rng)
    if 0.25 <= kind < 0.29:
        body = {"prompt": "x" * rng.choice([MAX_MODEL_LEN, 5000]), "max_tokens": 8}
        return Plan(_post("/v1/completions", json.dumps(body).encode()), frozenset({400, 503}))
    if 0.29 <= kind < 0.3:
        return Plan(_post("/v1/completions", b" " * (MAX_BODY_BYTES + 1)), frozenset({413}))
    path, body = _request(rng)
    content = _post(path, json.dumps(body).encode())
    samples = body.get("n", 1)
    return Plan(content, frozenset({200, 503, 504}), samples, bool(body["stream"]), leaves)


def _malformed(rng: random.Random) -> Plan:
    if rng.random() < 0.2:
        return Plan(b"NONSENSE\r\n\r\n", frozenset({400}))
    bodies: list[Any] = [[], {}, {"prompt": 3}, {"prompt": "x", "n": -1}, {"prompt": "x", "unknown": 1}]
    bodies += [{"prompt": "x", "temperature": "hot"}, {"prompt": [10**6]}, {"prompt": "x", "stop": ""}]
    content = json.dumps(rng.choice(bodies)).encode()
    return Plan(_post("/v1/completions", rng.choice([content, content[:-1], b"\xff"])), frozenset({400, 503}))


def _request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    text = SHARED[: rng.randrange(len(SHARED))] + rng.choice(_ENDINGS)
    body: dict[str, Any] = {
        "max_tokens": rng.randrange(1, 30),
        "temperature": rng.choice([0, 1]),
        "n": rng.choice([1, 1, 1, 2, 3]),
        "stream": rng.random() < 0.6,
        "ignore_eos": rng.random() < 0.7,
    }
    if rng.random() < 0.2:
        body |= {
            "stop": ["e", "th"],
            "stop_token_ids": rng.sample(range(256), 40),
            "seed": rng.randrange(100),
        }
    if rng.random() < 0.1:
        body |= {"presence_penalty": 0.5, "logit_bias": {"65": 2}}
    if rng.random() < 0.3:
        return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]}
    if rng.random() < 0.1:
        body["logprobs"] = 2
    return "/v1/completions", {**body, "prompt": text}


def _post(path: str, content: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(content) + content


async def crowd(
    address: tuple[str, int], all_plans: list[Plan], at_once: int, ended: Callable[[int], None]
) -> CrowdState:
    """All plans, ``at_once`` at any time; ``ended(count)`` as they end. An error for a wrong answer."""
    state, waiting, count = CrowdState(), iter(all_plans), 0

    async def client() -> None:
        nonlocal count
        for plan in waiting:
            await _one(address, plan, state)
            count += 1
            ended(count)

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(client())
    return state


async def _one(address: tuple[str, int], plan: Plan, state: CrowdState) -> None:
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(plan.content)
        async with asyncio.timeout(plan.leaves_after_s or 120):
            answer = await reader.read()
    except TimeoutError:
        assert plan.leaves_after_s is not None, "no answer within 120 s"
        state.outcomes[LEFT] += 1
        return
    finally:
        writer.close()
    if _check(plan, answer, state) == 503:
        await asyncio.sleep(PAUSE_S)


def _check(plan: Plan, answer: bytes, state: CrowdState) -> int:
    """The answer's status, if the answer is right."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split(b" ")[1])
    assert status in plan.statuses, answer[:1000]
    state.outcomes[NO_HTTP if plan.content.startswith(b"NONSENSE") else status] += 1
    if b"transfer-encoding: chunked" in head.lower():
        body = _unchunked(body)
    if status != 200:
        error = json.loads(body)["error"]
        assert error["message"]
        assert (status == 503) <= (b"retry-after: " in head.lower())
        return status
    if plan.is_stream:
        _check_stream(plan, body, state)
        return status
    choices = json.loads(body)["choices"]
    assert [choice["index"] for choice in choices] == list(range(plan.num_choices))
    for choice in choices:
        assert choice["finish_reason"] in ("stop", "length")
        state.finish_reasons[choice["finish_reason"]] += 1
    return status


def _check_stream(plan: Plan, body: bytes, state: CrowdState) -> None:
    *events, done, rest = body.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", ""), body[-300:]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    if "error" in chunks[-1]:
        assert chunks[-1]["error"]["code"] == "timeout", chunks[-1]
        state.finish_reasons["timeout"] += 1
        return
    reasons = {
        c["index"]: c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]
    }
    assert sorted(reasons) == list(range(plan.num_choices))
    state.finish_reasons.update(reasons.values())


def _unchunked(body: bytes) -> bytes:
    pieces = []
    while True:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            assert body == b"\r\n", "a chunked answer that does not end"
            return b"".join(pieces)
        pieces.append(body[:length])
        body = body[length + 2 :]
