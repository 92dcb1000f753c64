"""``pagedserve generate``: text on standard output as it comes, everything else elsewhere, and mistakes told."""

from __future__ import annotations

import inspect
import io
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from cli_models import CONFIG, save_tiny_model
from cli_run import Ran, Run, assert_refused

from pagedserve.cli import completions, engine_options
from pagedserve.cli.completions import PrinterState
from pagedserve.cli.engine_options import EngineOptions
from pagedserve.cli.sampling_options import SamplingOptions
from pagedserve.metrics.record import RunRecord

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--num-blocks", "64", "--dtype", "float32")
GREEDY = ("--temperature", "0", "--ignore-eos", "--max-tokens", "8", *SMALL)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    torch.set_num_threads(1)
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def generate(run: Run, model: Path) -> Run:
    """Run ``generate`` with the tiny model."""
    return lambda *args: run("generate", "--model", model, *args)


def outputs(ran: Ran) -> list[list[dict[str, Any]]]:
    assert ran.code == 0, ran
    return [prompt["completions"] for prompt in json.loads(ran.out)["prompts"]]


def greedy_text(generate: Run, prompt: str) -> str:
    return outputs(generate(*GREEDY, "--json", "-", prompt))[0][0]["text"]


def test_one_prompt_gives_its_text_alone_and_the_rest_on_standard_error(generate: Run, model: Path) -> None:
    from pagedserve.engine.llm import LLM
    from pagedserve.engine.params import SamplingParams

    ran = generate(*GREEDY, "hello")
    assert ran.code == 0
    llm = LLM(model, dtype="float32", num_blocks=64)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    assert ran.out == llm.generate("hello", params)[0][0].text + "\n"
    first, *decisions, last = ran.err.splitlines()
    assert first == f"loading {model}"
    assert decisions[:4] == list(llm.decisions)
    assert decisions[4].startswith("policy vllm_v1: batching mixed, ")
    number = r"[\d.,]+"
    assert re.fullmatch(
        rf"8 tokens \(1 length\), {number} output tokens/s, TTFT p50 {number} ms, ITL p50 {number} ms, "
        rf"KV occupancy {number}%, KV waste {number}%, peak running 1",
        last,
    )


def test_quiet_says_nothing_but_the_text(generate: Run) -> None:
    ran = generate(*GREEDY, "-q", "hello")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == greedy_text(generate, "hello") + "\n"


def test_text_comes_while_the_engine_steps(generate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagedserve.engine.engine import Engine

    num_steps, written = 0, []
    step = Engine.step

    def count(self: Engine) -> bool:
        nonlocal num_steps
        num_steps += 1
        return step(self)

    monkeypatch.setattr(Engine, "step", count)
    monkeypatch.setattr(completions, "_write", lambda text: written.append((num_steps, text)))
    assert generate(*GREEDY, "--stop-token-ids", "257", "hello").code == 0
    when = [at for at, text in written if text.strip()]
    assert len(when) >= 4
    assert when == sorted(set(when)), "one piece a step"
    assert when[0] == 1


def test_prompts_are_computed_together_and_printed_in_order_with_labels(
    generate: Run, tmp_path: Path
) -> None:
    texts = ["hello", "a much longer prompt than the first\nin  two lines", "x"]
    ran = generate(*GREEDY, "--out", tmp_path / "runs", *texts)
    alone = [greedy_text(generate, text) for text in texts]
    labels = ["hello", "a much longer prompt than the first in two lines", "x"]
    assert ran.out == "".join(
        f"--- {number} of 3: {label}\n{text}\n"
        for number, (label, text) in enumerate(zip(labels, alone, strict=True), 1)
    )
    record = RunRecord.load(tmp_path / "runs" / "vllm_v1")
    assert record.array("steps", "num_running").max() == 3
    assert record.steps.num_rows == 8


def test_samples_are_labelled_and_a_seed_repeats_them(generate: Run) -> None:
    args = ("--seed", "5", "--n", "2", "--max-tokens", "6", *SMALL, "hi")
    ran, (group,) = generate(*args), outputs(generate(*args, "--json", "-"))
    assert [completion["index"] for completion in group] == [0, 1]
    assert group[0]["token_ids"] != group[1]["token_ids"]
    assert ran.out == "".join(
        f"--- 1 of 1 (output {number} of 2): hi\n{completion['text']}\n"
        for number, completion in enumerate(group, 1)
    )
    (other,) = outputs(generate("--seed", "6", *args[2:], "--json", "-"))
    assert [c["token_ids"] for c in other] != [c["token_ids"] for c in group]


def test_json_is_alone_on_standard_output_and_has_everything(generate: Run, model: Path) -> None:
    ran = generate(*GREEDY, "--logprobs", 2, "--json", "-", "hello", "you")
    found = json.loads(ran.out)
    assert "tokens (2 length)" in ran.err
    assert found["model"] == str(model)
    assert [prompt["prompt"] for prompt in found["prompts"]] == ["hello", "you"]
    assert len(found["prompts"][0]["prompt_token_ids"]) == 5
    (completion,) = found["prompts"][1]["completions"]
    assert completion["finish_reason"] == "length"
    assert completion["error"] is None
    positions = completion["logprobs"]
    assert [position["token_id"] for position in positions] == completion["token_ids"]
    assert all(position["rank"] == 1 and len(position["top"]) == 2 for position in positions)
    assert all(position["top"][0]["logprob"] == position["logprob"] < 0 for position in positions)
    assert found["metrics"]["num_output_tokens"] == 16
    assert found["header"]["kind"] == "live"
    assert found["record"] is None


def test_json_into_a_file_beside_the_text(generate: Run, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    ran = generate(*GREEDY, "--json", path, "hello")
    assert json.loads(path.read_text())["prompts"][0]["completions"][0]["text"] + "\n" == ran.out
    assert_refused(generate(*GREEDY, "--json", path, "hello"), path, "exists already", "--overwrite")
    assert generate(*GREEDY, "--json", path, "--overwrite", "hello").code == 0


def test_stops_and_min_tokens_reach_the_engine(generate: Run) -> None:
    (whole,) = outputs(generate(*GREEDY, "--json", "-", "hello"))[0]
    ids = whole["token_ids"]
    args = (*GREEDY, "--json", "-", "--stop-token-ids", ids[2])
    (stopped,) = outputs(generate(*args, "hello"))[0]
    assert (stopped["finish_reason"], stopped["stop"]) == ("stop", ids[2])
    assert stopped["token_ids"] == ids[: ids.index(ids[2]) + 1]
    (later,) = outputs(generate(*args, "--min-tokens", 8, "hello"))[0]
    assert later["finish_reason"] == "length"
    text = next(char for char in whole["text"] if char.isascii())
    (cut,) = outputs(generate(*GREEDY, "--json", "-", "--stop", text, "hello"))[0]
    assert (cut["stop"], cut["text"]) == (text, whole["text"].partition(text)[0])


@pytest.mark.parametrize("args", [("--top-k", 1), ("--top-p", "1e-9"), ("--min-p", 1)])
def test_filters_down_to_one_token_are_greedy(args: tuple[Any, ...], generate: Run) -> None:
    (completion,) = outputs(
        generate("--ignore-eos", "--max-tokens", 8, *SMALL, *args, "--json", "-", "hello")
    )[0]
    assert completion["text"] == greedy_text(generate, "hello")


def test_policies_and_overlap_do_not_change_the_text_and_stand_in_the_record(
    generate: Run, run: Run, tmp_path: Path
) -> None:
    out = tmp_path / "runs"
    for args in (
        ("--policy", "static"),
        ("--policy", "mixed,allocator=contiguous_limit", "--overlap-depth", "1"),
        ("--policy", "prefill_first", "--set", "watermark=0.25", "--attention", "reference"),
    ):
        ran = generate(*GREEDY, *args, "--out", out, "hello")
        assert ran.out == greedy_text(generate, "hello") + "\n"
        assert f"record saved in {out}" in ran.err
    names = ["mixed,allocator=contiguous_limit", "prefill_first", "static"]
    assert sorted(path.name for path in out.iterdir()) == names
    headers = [RunRecord.load(out / name).header for name in names]
    assert [header["overlap_depth"] for header in headers] == [1, 0, 0]
    assert headers[1]["policy"]["watermark"] == 0.25
    assert headers[1]["device"]["attention"] == "reference"
    assert {header["trace"]["sha256"] for header in headers} == {headers[0]["trace"]["sha256"]}
    assert "output tokens/s" in run("report", out).out
    assert_refused(generate(*GREEDY, "--policy", "static", "--out", out, "hello"), "not empty", "--overwrite")


def test_limits_reach_the_engine(generate: Run) -> None:
    limits = {
        "max_num_batched_tokens": 24,
        "max_num_seqs": 3,
        "max_model_len": 30,
        "block_size": 5,
        "num_blocks": 7,
    }
    args = [part for name, value in limits.items() for part in ("--" + name.replace("_", "-"), value)]
    header = json.loads(generate("--max-tokens", 2, *args, "--json", "-", "hello").out)["header"]
    assert header["limits"] == {**limits, "max_num_queued_reqs": None}


def test_prompts_from_files_and_standard_input(
    generate: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes("two\nlines \u00e9\r\n".encode())
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe\n\n"))
    ran = generate(*GREEDY, "--json", "-", "first", "--prompt-file", path, "--prompt-file", "-")
    prompts = [prompt["prompt"] for prompt in json.loads(ran.out)["prompts"]]
    assert prompts == ["first", "two\nlines \u00e9", "from a pipe\n"]


def test_chat_applies_the_template(generate: Run, run: Run, tmp_path: Path) -> None:
    found = json.loads(generate(*GREEDY, "--chat", "--json", "-", "hi").out)["prompts"][0]
    plain = json.loads(generate(*GREEDY, "--json", "-", "hi").out)["prompts"][0]
    assert found["prompt"] == "hi"
    assert found["prompt_token_ids"] == [257, *plain["prompt_token_ids"], 256]
    bare = save_tiny_model(tmp_path / "bare", chat=False)
    ran = run("generate", "--model", bare, *GREEDY, "--chat", "hi")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.splitlines()[-1] == (
        "Error: --chat: this model's tokenizer has no chat template; leave the option out"
    )


BEFORE_LOADING: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no prompt": ((), ("no prompt", "--prompt-file")),
    "missing prompt file": (("--prompt-file", "nope.txt"), ("nope.txt", "nothing there")),
    "folder as prompt file": (("--prompt-file", "/"), ("a folder",)),
    "no text as prompt file": (("--prompt-file", sys.executable), ("--prompt-file", "not UTF-8 text")),
    "standard input twice": (("--prompt-file", "-", "--prompt-file", "-"), ("once",)),
    "temperature": (("--temperature", "-1", "x"), ("temperature is -1.0", "[0.0, 100.0]", "greedy")),
    "no number": (("--temperature", "warm", "x"), ("--temperature", "'warm' is not a number")),
    "no whole number": (("--n", "1.5", "x"), ("--n", "'1.5' is not a whole number")),
    "no token id": (("--stop-token-ids", "a", "x"), ("--stop-token-ids", "'a'")),
    "not a number": (("--top-p", "nan", "x"), ("top_p is nan", "(0.0, 1.0]")),
    "top_p": (("--top-p", "0", "x"), ("top_p is 0.0", "(0.0, 1.0]")),
    "top_k": (("--top-k", "-2", "x"), ("top_k is -2",)),
    "min_p": (("--min-p", "2", "x"), ("min_p is 2.0",)),
    "no output": (("--max-tokens", "0", "x"), ("max_tokens is 0", "at least one token")),
    "min above max": (("--min-tokens", "9", "--max-tokens", "3", "x"), ("min_tokens is 9", "max_tokens, 3")),
    "n": (("--n", "0", "x"), ("n is 0",)),
    "seed": (("--seed", str(2**63), "x"), ("seed is 9223372036854775808",)),
    "empty stop": (("--stop", "", "x"), ("stop[0] is empty",)),
    "logprobs on no screen": (("--logprobs", "2", "x"), ("--logprobs", "--json")),
    "unknown policy": (("--policy", "nope", "x"), ("'nope'", "vllm_v1")),
    "unknown setting": (("--set", "foo=1", "x"), ("'foo'", "watermark")),
    "overlap": (("--overlap-depth", "2", "x"), ("--overlap-depth", "0 to 1")),
    "dtype": (("--dtype", "int8", "x"), ("--dtype", "'int8'", "bfloat16")),
    "attention": (("--attention", "flash", "x"), ("'flash'", "reference")),
    "more requests than tokens": (("--max-num-seqs", "600", "x"), ("600", "512", "raise the token budget")),
    "no room for an output": (("--max-model-len", "1", "x"), ("--max-model-len", "at least 2")),
    "nothing to replace": (("--overwrite", "x"), ("--overwrite",)),
    "record over a file": (("--out", __file__, "x"), (Path(__file__).name, "is a file")),
    "JSON over a folder": (("--json", "/", "x"), ("a folder has this name",)),
}


@pytest.mark.parametrize("case", BEFORE_LOADING)
def test_mistakes_are_told_before_a_model_is_loaded(
    case: str, generate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    args, words = BEFORE_LOADING[case]
    monkeypatch.setattr(EngineOptions, "start", lambda *_, **__: pytest.fail("a model was loaded"))
    assert_refused(generate(*args), *words)


def test_no_model(run: Run) -> None:
    assert_refused(run("generate", "x"), "--model", "pagedserve generate --help")


BEHIND_LOADING: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "empty prompt": (("",), ("request 0 has 0 prompt tokens",)),
    "prompt too long": (
        ("--max-model-len", "8", "x", "eight tokens and more"),
        ("request 1 has 21 prompt tokens", "max_model_len is 8", "7 or fewer"),
    ),
    "prompt larger than the pool": (
        ("--num-blocks", "1", "more than 16 tokens"),
        ("19", "2 KV blocks", "pool has 1"),
    ),
    "longer than the model": (("--max-model-len", "999", "x"), ("max_model_len is 999", "256")),
    "stop id outside": (("--stop-token-ids", "258", "x"), ("stop_token_ids[0] is 258", "0 to 257")),
    "more logprobs than tokens": (("--logprobs", "999", "--json", "-", "x"), ("logprobs is 999", "258")),
    "contiguous with prefix caching": (
        ("--policy", "mixed,allocator=contiguous_max", "--enable-prefix-caching", "x"),
        ("ContiguousMax", "turn enable_prefix_caching off"),
    ),
    "pool beyond memory": (
        ("--num-blocks", str(10**12), "x"),
        ("--num-blocks 1000000000000", "GiB are free", "would fit"),
    ),
}


@pytest.mark.parametrize("case", BEHIND_LOADING)
def test_mistakes_that_only_the_model_shows(case: str, generate: Run, model: Path) -> None:
    args, words = BEHIND_LOADING[case]
    assert_one_line(generate(*args), *words)


def assert_one_line(ran: Ran, *words: str) -> None:
    """Exit code 2, no output, and behind what was decided one line that holds the words."""
    assert (ran.code, ran.out) == (2, ""), ran
    *before, last = ran.err.splitlines()
    assert last.startswith("Error: ")
    assert not any(line.startswith(("Error", "Traceback")) for line in before)
    for word in words:
        assert word in last


def test_models_that_cannot_be_loaded(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text(json.dumps(CONFIG))
    (pickled / "pytorch_model.bin").touch()
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')

    def offline(*_: Any, **__: Any) -> None:
        raise OSError("no route to the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    for name, words in {
        "smollm3": ("no model 'smollm3'", "smollm2-135m", "owner/name"),
        "nobody/nothing": ("'nobody/nothing'", "no route to the hub", "Without a connection"),
        str(tmp_path): ("no config.json", "no GGUF file"),
        str(pickled): ("pytorch_model.bin", "pickled", "safetensors"),
        str(pickled / "pytorch_model.bin"): ("pickled",),
        str(tmp_path / "gpt"): ("GPT2LMHeadModel",),
    }.items():
        assert_one_line(run("generate", "--model", name, "x"), *words)
    monkeypatch.setattr("pagedserve.engine.model.placement.available_bytes", lambda _: 1000)
    assert_one_line(run("generate", "--model", model, "x"), "1,000 bytes", "are available on cpu")


def test_an_output_that_fails_is_told_and_the_exit_code_says_so(run: Run, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    broken = save_tiny_model(tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][:] = float("nan")
    save_file(tensors, broken / "model.safetensors")
    ran = run("generate", "--model", broken, *SMALL, "x")
    assert (ran.code, ran.out) == (1, "\n")
    assert "(1 error)" in ran.err
    assert ran.err.splitlines()[-1].startswith("Error: request 0: ")


def test_an_interrupt_ends_the_line_and_the_process_with_130(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "long", max_position_embeddings=16384)
    args = ["--model", str(model), "--ignore-eos", "--max-tokens", "16000", "--max-model-len", "16384"]
    args += ["--num-blocks", "1024", "--out", str(tmp_path / "runs"), "--json", str(tmp_path / "r.json")]
    process = subprocess.Popen(
        [sys.executable, "-m", "pagedserve.cli.main", "generate", *args, "--overlap-depth", "1", "hello"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""},
    )
    stdout: Any = process.stdout
    assert 0 < len(stdout.read1(1 << 16)) < 4096, "text came in small pieces"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert out.endswith(b"\n")
    assert err.decode().splitlines()[-1] == (
        "Error: interrupted: what was being computed is lost, what was saved before is whole"
    )
    assert b"Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["long"]


def test_the_printer_keeps_the_order_of_completions(capsys: pytest.CaptureFixture[str]) -> None:
    printer = PrinterState(["one", "two", "three"])
    printer.begin()
    printer.add(2, "C", False)
    printer.add(1, "B", False)
    assert capsys.readouterr().out == "one\n"
    printer.add(0, "A", False)
    printer.add(1, "b", True)
    assert capsys.readouterr().out == "A"
    printer.add(0, "a", True)
    assert capsys.readouterr().out == "a\ntwo\nBb\nthree\nC"
    printer.break_off()
    assert capsys.readouterr().out == "\n"
    printer.add(2, "", True)
    assert capsys.readouterr().out == "\n"
    printer.break_off()
    assert capsys.readouterr().out == ""


def test_what_the_options_say_is_what_the_engine_has() -> None:
    """Choices and defaults are written down twice, so that help needs no torch."""
    from pagedserve.engine.llm import LLM
    from pagedserve.engine.params import SamplingParams
    from pagedserve.kernels.attention import BACKENDS

    own = inspect.signature(LLM.__init__).parameters
    for field in fields(EngineOptions):
        if field.name != "model":
            assert field.default == own[field.name].default, field.name
    assert set(engine_options.ATTENTIONS) == {"auto", *BACKENDS}
    defaults = {field.name: field.default for field in fields(SamplingParams)}
    unlike = [
        field.name
        for field in fields(SamplingOptions)
        if (field.default or ()) != (defaults[field.name] or ())
    ]
    assert unlike == ["max_tokens"]
    assert SamplingOptions().params(has_json=False) == SamplingParams(max_tokens=128)
