"""What clients do to connections, on real sockets: send nothing, send half, stop reading; and a killed server."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from server_apps import chunks_of, save_tiny
from server_processes import LONG, SLOW, Server, Streaming, get, line, post, served

LIMIT_S = 0.5
SHORT = {"prompt": "Once", "max_tokens": 3, "ignore_eos": True}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def impatient(model: Path) -> Iterator[Server]:
    """A server that waits half a second for a request, and a second for a reader."""
    options = ("--receive-timeout", LIMIT_S, "--send-timeout", 1, "--max-num-seqs", 64)
    with served(model, *options, before=SLOW) as server:
        server.wait()
        yield server
        assert "Traceback" not in server.said


def connect(server: Server, **options: Any) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    made = socket.socket()
    if "buffer" in options:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, options["buffer"])
    made.settimeout(30)
    made.connect((host, int(port)))
    return made


def request(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(content) + content


def rest(connection: socket.socket) -> bytes:
    """Everything until the server closes."""
    pieces = []
    while piece := connection.recv(1 << 16):
        pieces.append(piece)
    return b"".join(pieces)


def error_of(answer: bytes, status: int) -> dict[str, Any]:
    head, _, body = answer.rpartition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    return json.loads(body)["error"]


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /v1/comp",
        HEAD,
        HEAD + b"Content-Length: 100\r\n\r\n",
        HEAD + b'Content-Length: 100\r\n\r\n{"prompt": ',
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n4\r\n{   \r\n",
    ],
    ids=["nothing", "half a line", "half a head", "no body", "half a body", "half of chunks"],
)
def test_a_request_that_never_arrives_is_given_up(impatient: Server, sent: bytes) -> None:
    with connect(impatient) as connection:
        connection.sendall(sent)
        error = error_of(rest(connection), 408)
    assert error["code"] == "receive_timeout"
    assert "did not arrive within 0.5 s" in error["message"]


def test_a_byte_now_and_then_gains_no_time(impatient: Server) -> None:
    def drip() -> None:
        for byte in HEAD * 100:
            connection.sendall(bytes([byte]))
            time.sleep(0.02)

    with connect(impatient) as connection, pytest.raises(ConnectionError):
        drip()


def test_half_of_a_second_request_on_a_kept_connection_is_given_up(impatient: Server) -> None:
    with connect(impatient) as connection:
        connection.sendall(request(SHORT) + HEAD)
        answers = rest(connection)
    assert answers.startswith(b"HTTP/1.1 200 ")
    assert error_of(answers[answers.rindex(b"HTTP/1.1") :], 408)["code"] == "receive_timeout"


def test_a_kept_connection_may_rest_and_a_stream_may_take_its_time(impatient: Server) -> None:
    with httpx2.Client(base_url=impatient.url, trust_env=False) as http:
        for _ in range(2):
            assert http.post("/v1/completions", json=SHORT).status_code == 200
            time.sleep(2 * LIMIT_S)
    stream = Streaming(impatient.url, {**LONG, "max_tokens": 60})  # at 20 ms a token
    stream.join(60)
    assert chunks_of(stream.text)[-1]["choices"][0]["finish_reason"] == "length"


def test_what_is_no_http_gets_an_error_in_json(impatient: Server) -> None:
    for sent in (b"\x16\x03\x01 hello\r\n\r\n", HEAD + b"X: " + b"x" * 70_000):
        with connect(impatient) as connection:
            connection.sendall(sent)
            assert "send HTTP/1.1 with headers" in error_of(rest(connection), 400)["message"]


def test_a_reader_that_stops_reading_loses_its_connection_and_nobody_else(impatient: Server) -> None:
    """Once what lies between the two is full; what was sent and not taken is thrown away."""
    open_files = f"/proc/{impatient.process.pid}/fd"
    num_before = len(list(Path(open_files).iterdir()))
    with connect(impatient, buffer=4096) as connection:
        connection.sendall(request({**LONG, "n": 64, "logprobs": 5}))
        assert connection.recv(100)
        while "requests_open" not in (text := get(impatient.url, "/metrics").text):
            pass
        while not line(text, "pagedserve:requests_open").endswith(" 0.0"):
            assert post(impatient.url, SHORT).status_code == 200
            text = get(impatient.url, "/metrics").text
        assert line(text, 'request_success_total{engine="0",finished_reason="abort"').endswith(" 1.0")
        assert "a connection was dropped: the reader took nothing for 1 s" in impatient.said
        with pytest.raises(ConnectionError):
            rest(connection)
    while len(list(Path(open_files).iterdir())) > num_before:
        time.sleep(0.01)


def test_a_full_queue_says_when_to_come_back(model: Path) -> None:
    with served(model, "--max-num-queued-reqs", 2, "--max-num-seqs", 1, before=SLOW) as server:
        server.wait()
        runs = Streaming(server.url, {**LONG, "max_tokens": 100})
        assert runs.began.wait(60)
        waiting = [
            Streaming(server.url, {**LONG, "max_tokens": 5, "stream": stream}) for stream in (True, False)
        ]
        while not line(get(server.url, "/metrics").text, "pagedserve:queued_requests").endswith(" 2.0"):
            pass
        refused = post(server.url, SHORT)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "queue_full"
        assert refused.headers["retry-after"] == "1"
        for client in (runs, *waiting):
            client.join(60)
            assert client.status == 200
            assert '"finish_reason":"length"' in client.text
        assert post(server.url, SHORT).status_code == 200


def test_a_killed_server_is_a_clear_error_and_its_port_is_free(model: Path) -> None:
    with served(model, before=SLOW) as server:
        server.wait()
        port = int(server.url.rsplit(":", 1)[1])
        address = f"{server.url}/v1/completions"
        with httpx2.stream("POST", address, json=LONG, timeout=60, trust_env=False) as response:
            pieces = response.iter_bytes()
            assert next(pieces)
            server.process.send_signal(signal.SIGKILL)
            with pytest.raises(httpx2.RemoteProtocolError):
                list(pieces)
        assert server.end() == -signal.SIGKILL
        with pytest.raises(httpx2.ConnectError):
            post(server.url, SHORT)
    with served(model, "--port", port) as server:
        server.wait()
        assert post(server.url, SHORT).json()["usage"]["completion_tokens"] == 3


def test_sigterm_under_load_answers_everybody(model: Path) -> None:
    """CASES A7: running, queued and computing their prompts, streamed and whole; past the deadline too."""
    limits = ("--max-num-seqs", 4, "--shutdown-timeout", 0.5)
    with served(model, *limits, before=SLOW) as server:
        server.wait()
        clients = [Streaming(server.url, {**LONG, "max_tokens": 10 + 40 * i}) for i in range(6)]
        clients += [
            Streaming(server.url, {**LONG, "max_tokens": 10 + 40 * i, "stream": False}) for i in range(6)
        ]
        assert clients[0].began.wait(60)
        while not line(get(server.url, "/metrics").text, "pagedserve:requests_open").endswith(" 12.0"):
            if any(not client.is_alive() for client in clients):
                break
        server.process.send_signal(signal.SIGTERM)
        for client in clients:
            client.join(60)
        assert server.end() == 0
    for client in clients:
        if client.status == 503:
            assert json.loads(client.text)["error"]["code"] in ("shutting_down", "aborted")
        elif "data: " in client.text:
            assert chunks_of(client.text)[-1]["choices"][0]["finish_reason"] in ("length", "abort")
        else:
            assert json.loads(client.text)["choices"][0]["finish_reason"] == "length"
    assert {client.status for client in clients} == {200, 503}
    assert "Traceback" not in server.said
