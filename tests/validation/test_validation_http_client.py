from typing import Any

import pytest
from validation_http_server import MODELS, THREE, Status, free_url, prompts_of, serving, tokens_one_by_one

from pagedserve.validation.http_client import ServerError, base_url, completion_body
from pagedserve.validation.http_replay import replay_url


def test_without_extensions_only_the_protocol_s_own_fields_are_sent() -> None:
    assert b"ignore_eos" not in completion_body("m", [1], 2, extensions=False)
    assert b"min_tokens" not in completion_body("m", [1], 2, extensions=False)
    assert b"continuous" not in completion_body("m", [1], 2, extensions=False)
    assert completion_body("m", [1], 2, extensions=False).endswith(
        b'"stream_options":{"include_usage":true}}'
    )


def refused(url: str, **options: Any) -> str:
    with pytest.raises(ServerError) as refusal:
        replay_url(THREE, url, prompts=prompts_of(THREE), **options)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def test_a_server_that_is_not_there() -> None:
    url = free_url()
    message = refused(url)
    assert url in message
    assert "no server answers (ConnectError" in message


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("localhost:8000", "expected one such as http://localhost:8000"),
        ("ftp://host", "expected one such as"),
        ("http://", "expected one such as"),
        ("http://[::1", "is no URL"),
    ],
)
def test_an_address_that_is_none(url: str, words: str) -> None:
    assert words in refused(url)


def test_the_api_s_own_path_may_be_given_or_not() -> None:
    for end in ("", "/", "/v1", "/v1/", "/v1/completions"):
        assert str(base_url(f"https://host:1/proxy{end}?x=1#y")) == "https://host:1/proxy"
        assert str(base_url(f"http://host{end}")) == "http://host/"


def test_a_password_in_the_address_is_used_and_not_recorded() -> None:
    with serving() as server:
        url = server.url.replace("http://", "http://me:secret@")
        record = replay_url(THREE, url, prompts=prompts_of(THREE))
    assert server.headers[0]["authorization"].startswith("Basic ")
    assert "secret" not in str(record.header)


MODEL_ANSWERS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a wrong key": (Status(401, {"error": {"message": "bad key"}}), {"api_key": "x"}, "HTTP 401: bad key"),
    "another kind of server": (Status(200, b"<html>"), {}, "does not answer as an OpenAI-compatible"),
    "another JSON": ({"models": []}, {}, "does not answer as an OpenAI-compatible"),
    "no model": ({"data": []}, {}, "lists no model"),
    "no list": (Status(404), {}, "lists no model"),
}


@pytest.mark.parametrize("case", MODEL_ANSWERS)
def test_a_server_whose_models_are_no_help(case: str) -> None:
    models, options, words = MODEL_ANSWERS[case]
    with serving(models=models) as server:
        assert words in refused(server.url, **options)
    assert server.bodies == [], "nothing was sent"


def test_a_model_the_server_refuses() -> None:
    with serving(lambda _: Status(404, {"message": "The model `big` does not exist."})) as server:
        message = refused(server.url, model="big")
    assert "refuses the model 'big': HTTP 404: The model `big` does not exist." in message
    assert message.endswith("it lists: tiny, other")
    assert len(server.bodies) == 1


@pytest.mark.parametrize(("model", "models", "num_asked"), [("other", MODELS, 3), ("alias", MODELS, 4)])
def test_a_model_is_tried_only_where_the_server_does_not_list_it(
    model: str, models: Any, num_asked: int
) -> None:
    def script(body: dict[str, Any]) -> Any:
        return tokens_one_by_one(body) if body.get("stream") else Status(200, {"choices": []})

    with serving(script, models) as server:
        replay_url(THREE, server.url, model=model, prompts=prompts_of(THREE))
    assert server.asked("model") == [model] * num_asked


def test_a_connection_is_used_again_when_it_is_free() -> None:
    with serving() as server:
        replay_url(THREE[:1], server.url, prompts=[[1] * 4])
    assert server.num_connections == 1, "one for the models and the request"


def test_a_proxy_of_the_environment_is_not_asked_for_this_machine_s_own_servers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, free_url())
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with serving() as server:
        record = replay_url(THREE, server.url, prompts=prompts_of(THREE))
    assert record.header["counters"]["num_failed"] == 0
