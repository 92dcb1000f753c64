"""``serve --engine simulated`` as a process: a profile and a tokenizer are enough, and its record is honest."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from engine_models import engine_of
from server_apps import chunks_of, save_tiny
from server_processes import LONG, Streaming, get, line, post, served

from pagedserve.engine.profile_grid import Grid
from pagedserve.engine.profiler import profile_engine
from pagedserve.metrics.profile import Profile
from pagedserve.metrics.record import RunRecord
from pagedserve.simulator.measured import MeasuredCost
from pagedserve.validation.decisions import check_decisions

GRID = Grid((1, 16, 32), (0, 16), (1, 4), (8, 32), (16,), (2,), (1, 4))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's configuration and tokenizer."""
    folder = save_tiny(tmp_path_factory.mktemp("models") / "tiny")
    (folder / "model.safetensors").unlink()
    return folder


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile of that model."""
    path = tmp_path_factory.mktemp("profiles") / "tiny.json"
    with engine_of() as engine:
        profile_engine(engine, "tiny", GRID, num_repeats=1).save(path)
    return path


def test_it_serves_from_a_profile_without_weights_and_says_so(
    model: Path, profile: Path, tmp_path: Path
) -> None:
    options = ("--policy", "mixed", "--record", tmp_path, "--output-len", "6", "--block-size", "4")
    with served(model, "--engine", "simulated", "--profile", profile, *options) as server:
        server.wait()
        first = post(server.url, {"prompt": "Once", "max_tokens": 40, "temperature": 0}).json()
        assert (first["usage"]["completion_tokens"], first["choices"][0]["finish_reason"]) == (6, "stop")
        stream = Streaming(server.url, {**LONG, "max_tokens": 40, "temperature": 0})
        stream.join(60)
        chunks = chunks_of(stream.text)
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert len(text) == 40
        assert text.startswith(first["choices"][0]["text"])
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert post(server.url, {"prompt": "x", "logprobs": 1}).status_code == 400
        assert line(get(server.url, "/metrics").text, "generation_tokens_total").endswith(" 46.0")
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
    assert (
        "simulated engine: no weights, filler tokens, steps in real time; outputs stop at EOS" in server.said
    )
    assert "KV pool: 64 blocks of 4 tokens (256 tokens): as when the profile was measured" in server.said
    assert "46 steps in wall time: " in server.said
    record = RunRecord.load(tmp_path / "mixed")
    assert record.header["kind"] == "simulated"
    assert record.header["device"]["time"] == "wall"
    assert record.header["cost"] == MeasuredCost(Profile.load(profile)).describe()
    assert check_decisions(record, "mixed").identical


def test_a_signal_ends_a_step_of_an_hour(model: Path) -> None:
    times = ("--cost", "constant", "--step-us", "3.6e9", "--num-blocks", "64")
    with served(model, "--engine", "simulated", *times, "--shutdown-timeout", "0.1") as server:
        server.wait()
        stream = Streaming(server.url, LONG)
        while " 1.0" not in line(get(server.url, "/metrics").text, "num_requests_running"):
            pass
        server.process.send_signal(signal.SIGTERM)
        stream.join(60)
        assert stream.status == 503
        assert server.end() == 0
    assert "Traceback" not in server.said


def test_a_profile_of_another_model_is_refused(model: Path, profile: Path, tmp_path: Path) -> None:
    found = Profile.load(profile)
    found.provenance["geometry"]["num_layers"] = 99
    found.save(tmp_path / "other.json")
    with served(model, "--engine", "simulated", "--profile", tmp_path / "other.json") as server:
        assert server.end() == 2
    last = server.lines[-1]
    assert last.startswith("Error: the profile was measured on another model (tiny: num_layers 99")
    assert "2 here" in last
