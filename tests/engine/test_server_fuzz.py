"""A fuzz of the HTTP surface from our own OpenAPI document: no 500, no answer that the document does not have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import schemathesis
from engine_models import assert_nothing_held
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from server_apps import MODEL, Running, running

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
GENERATING = ("/v1/completions", "/v1/chat/completions")


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running() as made:
        yield made
        assert made.served.error is None
        assert not made.front.open
        while made.engine.has_work:
            pass
        assert_nothing_held(made.engine)


# Values that random ones hardly ever come to: a pattern that is one, ids that are tokens.
SENSIBLE: dict[str, Any] = {
    "guided_regex": "[ab]{2}",
    "guided_choice": ["yes", "no"],
    "guided_json": {"type": "integer", "minimum": 0, "maximum": 9},
    "guided_grammar": 'start: "<" /[ab]/ ">"',
    "structured_outputs": {"regex": "[cd]"},
    "response_format": {"type": "json_object"},
}
FORMS = tuple(SENSIBLE)
SENSIBLE |= {
    "logit_bias": {"65": -1.5},
    "allowed_token_ids": None,
    "prompt_logprobs": None,
    "stop_token_ids": [7],
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 3,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "min_tokens": 0,
    "stop": "zz",
    "echo": True,
    "prompt": [[97, 98], [99]],
    "top_logprobs": None,
    "logprobs": None,
    "stream_options": None,
}


def _examples(served: Running, mode: GenerationMode) -> st.SearchStrategy[Any]:
    schema: Any = schemathesis.openapi.from_asgi("/openapi.json", served.app)
    operations = [result.ok() for result in schema.get_all_operations()]
    return st.one_of([operation.as_strategy(generation_mode=mode) for operation in operations])


def _sensible(case: Any, keeps_extras: bool) -> None:
    """Nearer to what is served: the right model, few tokens, mostly no fields that nobody knows."""
    body = case.body
    if not isinstance(body, dict):
        return
    definition = case.operation.schema.raw_schema["components"]["schemas"]
    known = {name for schema in definition.values() for name in schema.get("properties", {})}
    if not keeps_extras:
        for name in [name for name in body if name not in known]:
            del body[name]
    if isinstance(body.get("model"), str):
        body["model"] = MODEL
    if case.operation.path in GENERATING:
        for name in ("max_tokens", "max_completion_tokens", "n", "min_tokens"):
            if isinstance(body.get(name), int) and not isinstance(body[name], bool):
                body[name] = body[name] % 5
        body.setdefault("max_tokens", 3)
        for name in [name for name in FORMS if name in body][1:]:
            del body[name]
        body |= {name: value for name, value in SENSIBLE.items() if name in body}


def _fuzz(served: Running, mode: GenerationMode, count: int) -> None:
    seen: Counter[tuple[str, int]] = Counter()

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    @given(case=_examples(served, mode), is_sensible=st.booleans(), keeps_extras=st.booleans())
    def run(case: Any, is_sensible: bool, keeps_extras: bool) -> None:
        if is_sensible:
            _sensible(case, keeps_extras)
        response = case.call()
        case.validate_response(response, checks=CHECKS)
        seen[case.operation.path, response.status_code] += 1

    fuzz: Callable[[], None] = run
    fuzz()
    assert served.served.error is None, "the engine died"
    if mode is GenerationMode.POSITIVE:
        _check_reach(seen)


def _check_reach(seen: Counter[tuple[str, int]]) -> None:
    """A fuzz that is only ever refused shows nothing."""
    for path in (*GENERATING, "/tokenize", "/detokenize"):
        assert seen[path, 200], f"{path} never succeeded: {seen}"
        assert seen[path, 400], f"{path} was never refused: {seen}"


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_no_request_makes_the_server_fail(served: Running, mode: GenerationMode) -> None:
    """CASES H3."""
    _fuzz(served, mode, 250)


@pytest.mark.long
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_no_request_of_many_makes_the_server_fail(served: Running, mode: GenerationMode) -> None:
    _fuzz(served, mode, 2000)
