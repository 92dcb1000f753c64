"""The server's app around a tiny model, in this process, and clients of it."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
from engine_models import assert_nothing_held, engine_of, hf_config, tokenizer
from engine_serving import run
from fastapi import FastAPI

from pagedserve.engine.async_engine import AsyncEngine
from pagedserve.engine.server.app import make_app
from pagedserve.engine.server.backend import ThreadBackend
from pagedserve.engine.server.front import FrontEnd
from pagedserve.engine.server.settings import ServerSettings
from pagedserve.policy import Limits, Policy

MODEL = "tiny"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'nobody' %}{{ raise_exception('who is nobody?') }}{% endif %}"
    "{{ '<|user|>' + message['content'] }}{% endfor %}"
    "{% if shout is defined and shout %}{{ '!' }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|end|>' }}{% endif %}"
)


@cache
def hf_tokenizer(chat: bool = True) -> Any:
    """The byte tokenizer as transformers has it."""
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), eos_token="<|end|>")
    made.chat_template = CHAT_TEMPLATE if chat else None
    return made


class Gate:
    """Stands before every step of an engine: closed, nothing runs; ``steps`` lets so many through."""

    def __init__(self, served: AsyncEngine) -> None:
        self._step, self._open, self._permits = served.engine.step, True, threading.Semaphore(0)
        served.engine.step = self._gated

    def _gated(self) -> bool:
        if not self._open:
            self._permits.acquire()
        return self._step()

    def close(self) -> None:
        """From the next step on."""
        self._open = False

    def steps(self, count: int) -> None:
        """Let ``count`` steps through."""
        for _ in range(count):
            self._permits.release()

    def open(self) -> None:
        """Let everything run."""
        self._open = True
        self._permits.release(1000)


class Running:
    """A served tiny model: its app, front end, engine and gate."""

    def __init__(self, app: FastAPI, served: AsyncEngine) -> None:
        self.app, self.served, self.engine = app, served, served.engine
        self.front: FrontEnd = app.state.front
        self.gate = Gate(served)

    @asynccontextmanager
    async def client(self, **headers: str) -> AsyncIterator[httpx2.AsyncClient]:
        """A client whose requests are answered in this process."""
        transport = httpx2.ASGITransport(self.app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://test", headers=headers) as http:
            yield http

    async def ask(self, path: str, body: dict[str, Any], **headers: str) -> httpx2.Response:
        """One request's answer."""
        async with self.client(**headers) as http:
            return await http.post(path, json=body)

    async def complete(self, **body: Any) -> dict[str, Any]:
        """A completion that succeeds."""
        response = await self.ask("/v1/completions", {"temperature": 0, "ignore_eos": True, **body})
        assert response.status_code == 200, response.text
        return response.json()

    async def stream(self, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
        """The chunks of a stream that succeeds and ends as it should."""
        asked = {"temperature": 0, "ignore_eos": True, "stream": True, **body}
        response = await self.ask(path, asked)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return chunks_of(response.text)

    async def until(self, what: Any) -> None:
        """Wait until ``what()`` holds."""
        while not what():
            await asyncio.sleep(0.002)

    async def at_rest(self) -> None:
        """Wait until no request is open and the engine sleeps, and see that nothing is left of any (CASES A5)."""
        await self.until(lambda: not self.front.open)
        while True:
            with self.served._stepping:  # between two steps, what a step is about to do is nowhere else
                if not self.engine.has_work:
                    assert_nothing_held(self.engine)
                    break
            await asyncio.sleep(0.002)
        front = self.front
        assert (front.admission.num_reqs, front.admission.num_tokens, front.counts.num_open) == (0, 0, 0)

    def talk(self, path: str, body: dict[str, Any]) -> "Talk":
        """A request whose connection the test holds in its hands."""
        return Talk(self.app, path, body)


def usage_of(num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int = 0) -> dict[str, Any]:
    """The usage that an answer tells."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


def chunks_of(text: str) -> list[dict[str, Any]]:
    """The JSON of a stream's events, the last of which is ``[DONE]``."""
    *events, last, rest = text.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def texts_of(chunks: list[dict[str, Any]], count: int = 1) -> list[str]:
    """The text of each choice of a completions stream."""
    texts = [""] * count
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    return texts


class Talk:
    """One HTTP request at the level of ASGI messages: see what is sent, take nothing more, or leave."""

    def __init__(self, app: Any, path: str, body: dict[str, Any], method: str = "POST") -> None:
        self.sent: list[dict[str, Any]] = []
        self._body, self._has_left = json.dumps(body).encode(), asyncio.Event()
        self._takes = asyncio.Event()
        self._takes.set()
        headers = [(b"content-type", b"application/json")]
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "headers": headers,
        }
        scope |= {"query_string": b"", "http_version": "1.1", "scheme": "http", "server": ("test", 80)}
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body:
            body, self._body = self._body, b""
            return {"type": "http.request", "body": body, "more_body": False}
        await self._has_left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        await self._takes.wait()
        self.sent.append(message)

    def leave(self) -> None:
        """Close the connection."""
        self._has_left.set()

    def stop_taking(self) -> None:
        """Read nothing more, and keep the connection."""
        self._takes.clear()

    @property
    def text(self) -> str:
        """What was sent of the body."""
        return b"".join(message.get("body", b"") for message in self.sent).decode()

    @property
    def status(self) -> int | None:
        """The answer's status, None before it is sent."""
        return self.sent[0]["status"] if self.sent else None


@contextmanager
def running(
    spec: str | Policy = "vllm_v1",
    limits: Limits | None = None,
    depth: int = 0,
    *,
    chat: bool = True,
    **settings: Any,
) -> Iterator[Running]:
    """A served tiny model; ``settings`` are those of `ServerSettings`."""
    with engine_of(spec, limits, depth=depth) as engine, AsyncEngine(engine) as served:
        backend = ThreadBackend(served, "vllm_v1")
        app = make_app(backend, hf_tokenizer(chat), ServerSettings((MODEL, "alias"), **settings))
        made = Running(app, served)
        try:
            yield made
        finally:
            made.gate.open()
            made.front.codec.close()


def run_served(main: Callable[[Running], Coroutine[Any, Any, Any]], **options: Any) -> Any:
    """What ``main`` finds at a served tiny model; ``options`` are those of `running`."""
    with running(**options) as served:
        return run(main(served))


def save_tiny(folder: Path) -> Path:
    """The tiny model as a directory that the command can load."""
    from safetensors.torch import save_file

    from pagedserve.engine.model.config import ModelConfig
    from pagedserve.engine.model.weights import random_weights

    folder.mkdir(parents=True)
    config = {**hf_config("llama").to_dict(), "max_position_embeddings": 2048, "eos_token_id": 256}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(random_weights(ModelConfig.from_hf(config), 7).items()), folder / "model.safetensors")
    hf_tokenizer().save_pretrained(str(folder))
    return folder
