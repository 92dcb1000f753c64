"""``pagedserve generate``: text on standard output as it comes, everything else elsewhere."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from cli_generating import GREEDY, SMALL, greedy_text, outputs
from cli_models import save_tiny_model
from cli_run import Run, assert_refused

from pagedserve.cli import completions
from pagedserve.metrics.record import RunRecord


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


def test_penalties_biases_and_forms_reach_the_engine(generate: Run, tmp_path: Path) -> None:
    letters = tmp_path / "letters.lark"
    letters.write_text('start: "<" /[a-c]{2}/ ">"')
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": [7]}')
    for args, pattern in [
        (("--logit-bias", "17:100"), "^2{8}$"),
        (("--logit-bias", "17:9", "--frequency-penalty", "2", "--presence-penalty", "2"), "^2(?!2{7})"),
        (("--logit-bias", "17:9", "--repetition-penalty", "50"), "^2(?!2{7})"),
        (("--guided-regex", "[xyz]{3}"), "^[xyz]{3}$"),
        (("--guided-choice", "yes", "--guided-choice", "no"), "^(yes|no)$"),
        (("--guided-grammar", letters), "^<[a-c]{2}>$"),
        (("--guided-json", schema), "^7$"),
    ]:
        ran = generate(*SMALL, "--temperature", 0, "--max-tokens", 8, *args, "hello")
        assert re.search(pattern, ran.out.removesuffix("\n")), (args, ran.out, ran.err)


def test_prompt_logprobs_are_in_the_json(generate: Run) -> None:
    found = json.loads(generate(*GREEDY, "--prompt-logprobs", 1, "--json", "-", "hello").out)
    (completion,) = found["prompts"][0]["completions"]
    first, *others = completion["prompt_logprobs"]
    assert first is None
    assert [position["token"] for position in others] == list("ello")
    assert all(position["logprob"] < 0 and len(position["top"]) == 1 for position in others)


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
    assert header["limits"] == {**limits, "max_num_queued_reqs": None, "num_cpu_blocks": 0}


def test_prompts_from_files_and_standard_input(
    generate: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes("two\nlines \u00e9\r\n".encode())
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe\n\n"))
    ran = generate(*GREEDY, "--json", "-", "first", "--prompt-file", path, "--prompt-file", "-")
    prompts = [prompt["prompt"] for prompt in json.loads(ran.out)["prompts"]]
    assert prompts == ["first", "two\nlines \u00e9", "from a pipe\n"]


def test_a_prompt_from_a_pipe_with_a_name(generate: Run, tmp_path: Path) -> None:
    """As a shell makes of <(...)."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=("from afar\n",), daemon=True)
    writer.start()
    ran = generate(*GREEDY, "--json", "-", "--prompt-file", path)
    assert [prompt["prompt"] for prompt in json.loads(ran.out)["prompts"]] == ["from afar"]


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
