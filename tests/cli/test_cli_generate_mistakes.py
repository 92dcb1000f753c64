"""``pagedserve generate`` refuses what cannot be done in one line, as early as it can be known."""

from __future__ import annotations

import gc
import inspect
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from cli_generating import SMALL, assert_one_line
from cli_models import CONFIG, save_tiny_model
from cli_run import Run, assert_refused

from pagedserve.cli import engine_options
from pagedserve.cli.engine_options import EngineOptions
from pagedserve.cli.sampling_options import SamplingOptions

BEFORE_LOADING: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no prompt": ((), ("no prompt", "--prompt-file")),
    "missing prompt file": (("--prompt-file", "nope.txt"), ("nope.txt", "nothing there")),
    "folder as prompt file": (("--prompt-file", "/"), ("a folder",)),
    "no text as prompt file": (("--prompt-file", sys.executable), ("--prompt-file", "not UTF-8 text")),
    "standard input twice": (("--prompt-file", "-", "--prompt-file", "-"), ("once",)),
    "temperature": (("--temperature", "-1", "x"), ("--temperature is -1.0", "[0.0, 100.0]", "greedy")),
    "no number": (("--temperature", "warm", "x"), ("--temperature", "'warm' is not a number")),
    "no whole number": (("--n", "1.5", "x"), ("--n", "'1.5' is not a whole number")),
    "no token id": (("--stop-token-ids", "a", "x"), ("--stop-token-ids", "'a'")),
    "not a number": (("--top-p", "nan", "x"), ("--top-p is nan", "(0.0, 1.0]")),
    "top_p": (("--top-p", "0", "x"), ("--top-p is 0.0", "(0.0, 1.0]")),
    "top_k": (("--top-k", "-2", "x"), ("--top-k is -2",)),
    "min_p": (("--min-p", "2", "x"), ("--min-p is 2.0",)),
    "no output": (("--max-tokens", "0", "x"), ("--max-tokens is 0", "at least one token")),
    "min above max": (
        ("--min-tokens", "9", "--max-tokens", "3", "x"),
        ("--min-tokens is 9", "--max-tokens, 3"),
    ),
    "n": (("--n", "0", "x"), ("--n is 0",)),
    "seed": (("--seed", str(2**63), "x"), ("--seed is 9223372036854775808",)),
    "empty stop": (("--stop", "", "x"), ("--stop[0] is empty",)),
    "logprobs on no screen": (("--logprobs", "2", "x"), ("--logprobs", "--json")),
    "prompt logprobs on no screen": (("--prompt-logprobs", "2", "x"), ("--prompt-logprobs", "--json")),
    "penalty": (("--presence-penalty", "3", "x"), ("--presence-penalty is 3.0", "[-2.0, 2.0]")),
    "no repetition": (("--repetition-penalty", "0", "x"), ("--repetition-penalty is 0.0", "use 1")),
    "bias without a colon": (("--logit-bias", "17", "x"), ("--logit-bias", "'17'", "17:-2.5")),
    "bias of no id": (("--logit-bias", "a:1", "x"), ("--logit-bias", "'a' is not a whole number")),
    "bias too large": (("--logit-bias", "5:101", "x"), ("--logit-bias[5] is 101.0", "-100")),
    "two forms": (
        ("--guided-regex", "a", "--guided-choice", "b", "x"),
        ("--guided-regex and --guided-choice ask for a form each", "give one"),
    ),
    "a form and a least length": (
        ("--guided-regex", "a", "--min-tokens", "2", "x"),
        ("--min-tokens is 2 beside a --guided form", "leave one of them out"),
    ),
    "empty pattern": (("--guided-regex", "", "x"), ("--guided-regex is empty", "give a pattern")),
    "no such schema": (("--guided-json", "/nowhere/s.json", "x"), ("/nowhere/s.json", "No such file")),
    "unknown policy": (("--policy", "nope", "x"), ("'nope'", "vllm_v1")),
    "unknown setting": (("--set", "foo=1", "x"), ("'foo'", "watermark")),
    "overlap": (("--overlap-depth", "2", "x"), ("--overlap-depth", "0 to 1")),
    "dtype": (("--dtype", "int8", "x"), ("--dtype", "'int8'", "bfloat16")),
    "KV cache dtype": (("--kv-cache-dtype", "int4", "x"), ("'int4'", "fp8")),
    "device": (("--device", "gpu", "x"), ("'gpu'", "cuda:N")),
    "attention": (("--attention", "flash", "x"), ("'flash'", "reference")),
    "more requests than tokens": (
        ("--max-num-seqs", "600", "x"),
        ("--max-num-seqs 600 exceeds --max-num-batched-tokens 512", "raise the token budget"),
    ),
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
        ("request 1 has 21 prompt tokens", "--max-model-len is 8", "7 or fewer"),
    ),
    "prompt larger than the pool": (
        ("--num-blocks", "1", "more than 16 tokens"),
        ("19", "2 KV blocks", "pool has 1"),
    ),
    "longer than the model": (("--max-model-len", "999", "x"), ("--max-model-len is 999", "256")),
    "stop id outside": (("--stop-token-ids", "258", "x"), ("--stop-token-ids[0] is 258", "0 to 257")),
    "more logprobs than tokens": (("--logprobs", "999", "--json", "-", "x"), ("--logprobs is 999", "258")),
    "bias outside": (("--logit-bias", "258:1", "x"), ("--logit-bias has the id 258", "0 to 257")),
    "a cache that attention cannot read": (
        ("--kv-cache-dtype", "fp8", "x"),
        ("--kv-cache-dtype is fp8", "attention 'cpu'", "use attention triton"),
    ),
    "scales of a cache that has none": (
        ("--calculate-kv-scales", "x"),
        ("--calculate-kv-scales is true beside --kv-cache-dtype auto", "choose --kv-cache-dtype fp8"),
    ),
    "no pattern": (("--guided-regex", "(a", "x"), ("--guided-regex cannot be used", "unclosed group")),
    "contiguous with prefix caching": (
        ("--policy", "mixed,allocator=contiguous_max", "--enable-prefix-caching", "x"),
        ("ContiguousMax", "turn --enable-prefix-caching off"),
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


def test_what_the_options_say_is_what_the_engine_has() -> None:
    """Choices and defaults are written down twice, so that help needs no torch."""
    from pagedserve.engine.llm import LLM
    from pagedserve.engine.model.kv_dtype import KV_CACHE_DTYPES
    from pagedserve.engine.params import SamplingParams
    from pagedserve.kernels.attention import BACKENDS

    own = inspect.signature(LLM.__init__).parameters
    for field in fields(EngineOptions):
        if field.name != "model":
            assert field.default == own[field.name].default, field.name
    assert set(engine_options.ATTENTIONS) == {"auto", *BACKENDS}
    assert engine_options.KV_CACHE_DTYPES == KV_CACHE_DTYPES
    defaults = {field.name: field.default for field in fields(SamplingParams)}
    unlike = [
        field.name
        for field in fields(SamplingOptions)
        if (field.default or ()) != (defaults[field.name] or ())
    ]
    assert unlike == ["max_tokens"]
    assert SamplingOptions().params(has_json=False) == SamplingParams(max_tokens=128)


def test_a_malformed_tokenizer_is_told(run: Run, tmp_path: Path) -> None:
    broken = save_tiny_model(tmp_path / "broken")
    (broken / "tokenizer.json").write_text('{"version": "1.0"')
    assert_one_line(run("generate", "--model", broken, "x"), str(broken), "the tokenizer cannot be read")


def test_a_device_that_is_not_there_is_told(generate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_one_line(generate("--device", "cuda:1", "x"), "device cuda:1", "finds no CUDA device; use cpu")
    assert generate("--device", "cpu", *SMALL, "--max-tokens", "1", "x").code == 0


@pytest.mark.parametrize("command", [("generate", "x"), ("profile",)])
def test_the_heap_is_settled_once_the_engine_is_there(
    command: tuple[str, ...], run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagedserve.engine import heap
    from pagedserve.engine.llm import LLM

    settled: list[bool] = []

    def settle() -> None:
        settled.append(any(isinstance(found, LLM) for found in gc.get_objects()))
        raise KeyboardInterrupt

    monkeypatch.setattr(heap, "settle_heap", settle)
    out = ("--out", tmp_path / "p.json") if command == ("profile",) else ()
    assert run(*command, "--model", model, *SMALL, *out).code == 130
    assert settled == [True]


def test_a_chat_template_that_fails_is_told(run: Run, tmp_path: Path) -> None:
    strict = save_tiny_model(tmp_path / "strict")
    settings = json.loads((strict / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{{ raise_exception('a system message must come first') }}"
    (strict / "tokenizer_config.json").write_text(json.dumps(settings))
    ran = run("generate", "--model", strict, *SMALL, "--chat", "x")
    assert_one_line(ran, "--chat: this model's chat template failed", "a system message must come first")
