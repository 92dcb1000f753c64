"""CASES H3, by brute force: whatever the value of whichever field, the answer is never an error of ours."""

import json
import random
from typing import Any

import pytest
from engine_serving import run
from server_apps import Running, running

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ODD_VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    7,
    2**31,
    2**63,
    -(2**63) - 1,
    10**40,
    0.0,
    0.5,
    -0.5,
    1e308,
]
ODD_VALUES += [
    "",
    "x",
    "\x00",
    "é\u2028",
    "x" * 2000,
    [],
    [0],
    [1, 2],
    [[1], [2]],
    ["a", ""],
    [None],
    {},
    {"a": {}},
]
ODD_VALUES += [
    float("nan"),
    float("inf"),
    {"include_usage": True},
    [{"role": "user", "content": "x"}],
    257,
    258,
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_no_odd_value_of_any_field_is_an_error_of_ours(path: str) -> None:
    """Each field with each value, then several at once: an answer or a refusal in OpenAI's form, never a 500."""
    start: dict[str, Any] = {"prompt": "x", "max_tokens": 2} if path == COMPLETIONS else {"prompt": "x"}
    start = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2} if path == CHAT else start
    start = {"tokens": [1]} if path == "/detokenize" else start

    async def main(served: Running) -> None:
        async with served.client() as http:
            schemas = (await http.get("/openapi.json")).json()["components"]["schemas"]
            fields = sorted({name for schema in schemas.values() for name in schema.get("properties", {})})
            assert len(fields) > 30
            rng = random.Random(0)
            bodies = [{**start, name: value} for name in fields for value in ODD_VALUES]
            for _ in range(200):
                names = rng.sample(fields, 3)
                bodies.append({**start, **{name: rng.choice(ODD_VALUES) for name in names}})
            statuses = set()
            for body in bodies:
                content = json.dumps(body).encode()
                answer = await http.post(path, content=content, headers={"Content-Type": "application/json"})
                assert answer.status_code in (200, 400, 404), (body, answer.text)
                statuses.add(answer.status_code)
                if answer.status_code != 200:
                    assert answer.json()["error"]["message"], body
            assert {200, 400} <= statuses
        await served.at_rest()
        assert (await served.complete(prompt="x", max_tokens=2))["usage"]["completion_tokens"] == 2

    with running() as served:
        run(main(served))
