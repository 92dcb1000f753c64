"""The server as a process on a real socket: its start line, its signals, its exit codes, its record."""

from __future__ import annotations

import json
import signal
import socket
import time
from pathlib import Path

import pytest
from server_apps import chunks_of, save_tiny
from server_processes import LONG, SLOW, Streaming, get, line, post, served

from pagedserve.metrics.record import RunRecord

FAULT = """
from pagedserve.engine.loop import EngineLoop
step, count = EngineLoop.step, iter(range(1000))
def failing(self):
    if next(count) == 5:
        raise RuntimeError("the device is gone")
    return step(self)
EngineLoop.step = failing
"""
TABLE = """
import sys
from pagedserve.engine.sampling.grammar import GrammarCompiler
make = GrammarCompiler._make_tokenizer
def told(self):
    print("making the table of tokens", file=sys.stderr, flush=True)
    return make(self)
GrammarCompiler._make_tokenizer = told
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


def test_it_serves_keeps_a_record_and_ends_well(model: Path, tmp_path: Path) -> None:
    with served(model, "--served-model-name", "small", "--policy", "mixed", "--record", tmp_path) as server:
        start_line = server.wait()
        assert start_line == f"serving small on {server.url} (this machine only, no API key asked for)"
        assert get(server.url, "/health").status_code == 200
        whole = post(server.url, {"prompt": "Once", "max_tokens": 5, "temperature": 0, "ignore_eos": True})
        assert whole.json()["usage"]["completion_tokens"] == 5
        assert whole.json()["model"] == "small"
        stream = Streaming(server.url, {**LONG, "max_tokens": 5, "temperature": 0})
        stream.join(60)
        texts = [chunk["choices"][0]["text"] for chunk in chunks_of(stream.text)]
        assert "".join(texts) == whole.json()["choices"][0]["text"]
        assert post(server.url, {"prompt": "x", "n": 0}).status_code == 400
        assert "vllm:generation_tokens_total" in get(server.url, "/metrics").text
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
    assert "SIGTERM: no request is open; going down" in server.said
    record = RunRecord.load(tmp_path / "mixed")
    assert record.requests["num_output_tokens"].to_pylist() == [5, 5]
    assert record.header["kind"] == "live"
    assert "Traceback" not in server.said


def test_what_forms_of_output_need_is_made_before_it_listens(model: Path) -> None:
    """Making it holds up every thread of the process; a server that is in use must not stop for it."""
    with served(model, before=TABLE) as server:
        start_line = server.wait()
        asked = {"prompt": "x", "max_tokens": 40, "guided_choice": ["yes"]}
        assert post(server.url, asked).json()["choices"][0]["text"] == "yes"
        assert server.lines.count("making the table of tokens") == 1
        assert server.lines.index("making the table of tokens") < server.lines.index(start_line)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_open_requests_finish_and_refuses_new_ones(model: Path, number: signal.Signals) -> None:
    """CASES A7."""
    with served(model, before=SLOW) as server:
        server.wait()
        stream = Streaming(server.url, {**LONG, "max_tokens": 80})
        assert stream.began.wait(60)
        server.process.send_signal(number)
        while "no new requests" not in server.said:
            time.sleep(0.01)
        assert get(server.url, "/health").status_code == 503
        assert post(server.url, {"prompt": "x"}).json()["error"]["code"] == "shutting_down"
        stream.join(60)
        assert chunks_of(stream.text)[-1]["choices"][0]["finish_reason"] == "length"
        assert server.end() == 0
    assert f"{number.name}: no new requests; 1 open ones have 30 s to finish" in server.said


@pytest.mark.parametrize("second", [True, False], ids=["second signal", "deadline"])
def test_what_is_open_at_the_deadline_gets_a_final_chunk(model: Path, second: bool) -> None:
    limit = () if second else ("--shutdown-timeout", "0.2")
    with served(model, *limit, before=SLOW) as server:
        server.wait()
        stream = Streaming(server.url, LONG)
        assert stream.began.wait(60)
        server.process.send_signal(signal.SIGTERM)
        if second:
            while "no new requests" not in server.said:
                time.sleep(0.01)
            server.process.send_signal(signal.SIGTERM)
        stream.join(60)
        assert chunks_of(stream.text)[-1]["choices"][0]["finish_reason"] == "abort"
        assert server.end() == 0
    assert "Traceback" not in server.said


def test_a_fault_of_the_engine_ends_the_process_with_1_and_saves_the_record(
    model: Path, tmp_path: Path
) -> None:
    with served(model, "--record", tmp_path, before=FAULT) as server:
        server.wait()
        stream = Streaming(server.url, LONG)
        stream.join(60)
        assert chunks_of(stream.text)[-1]["error"]["code"] == "engine_dead"
        assert server.end() == 1
    assert "Error: the engine failed: the device is gone" in server.said
    assert RunRecord.load(tmp_path / "vllm_v1").steps.num_rows == 5


def test_a_closed_connection_stops_the_work(model: Path) -> None:
    """CASES A6, on a socket: whole and streamed."""
    with served(model, before=SLOW) as server:
        server.wait()
        host, port = server.url.removeprefix("http://").split(":")
        for stream in (False, True):
            body = json.dumps({**LONG, "stream": stream}).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
                while "vllm:num_requests_running" not in (text := get(server.url, "/metrics").text):
                    pass
                while "pagedserve:requests_open{" not in text or " 1.0" not in line(text, "requests_open"):
                    text = get(server.url, "/metrics").text
            while " 0.0" not in line(get(server.url, "/metrics").text, "num_requests_running"):
                time.sleep(0.01)
        text = get(server.url, "/metrics").text
        assert line(text, 'request_success_total{engine="0",finished_reason="abort"').endswith(" 2.0")
        assert float(line(text, "generation_tokens_total").split()[-1]) < 500


def test_keys_are_asked_for_and_never_said(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("first-secret\n", encoding="utf-8")
    with served(model, "--api-key-file", file, PAGEDSERVE_API_KEYS="second-secret") as server:
        assert server.wait().endswith("(this machine only, 2 API keys)")
        body = {"prompt": "x", "max_tokens": 1}
        assert post(server.url, body, Authorization="Bearer wrong-secret").status_code == 401
        for key in ("first-secret", "second-secret"):
            assert post(server.url, body, Authorization=f"Bearer {key}").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
    assert "secret" not in server.said


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--host", "192.0.2.1"), "--host 192.0.2.1 --port 0: "),
        (("--api-key-file", "nowhere"), "nowhere: No such file or directory"),
        (("--overwrite",), "--overwrite: no record is saved"),
        (("--request-timeout", "0"), "0 is not a number above 0"),
        (("--served-model-name", ""), "model_names has"),
        (("--allowed-origins", "localhost"), "--allowed-origins has 'localhost'; give a scheme and a host"),
        (("--receive-timeout", "0"), "0 is not a number above 0"),
    ],
)
def test_mistakes_are_one_line_before_a_model_is_loaded(
    model: Path, args: tuple[str, ...], words: str
) -> None:
    with served(model, *args) as server:
        assert server.end() == 2
    (told,) = server.lines
    assert told.startswith("Error: ")
    assert words in told


def test_a_taken_port_is_one_line(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with served(model, "--port", taken.getsockname()[1]) as server:
            assert server.end() == 2
        (told,) = server.lines
    assert "Address already in use; choose another address or port" in told
