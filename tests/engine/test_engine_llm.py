"""`LLM`: prompts in, completions out, from a folder on disk; and what happens when something goes wrong."""

import json
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from engine_models import EOS, NUM_TOKENS, assert_drained, hf_greedy, hf_model, ids_of, scripted, tokenizer

from pagedserve.engine.engine import EngineDead
from pagedserve.engine.interrupts import InterruptsState
from pagedserve.engine.kv_memory import PoolTooLarge
from pagedserve.engine.llm import LLM
from pagedserve.engine.model.load import load_model
from pagedserve.engine.params import SamplingParams
from pagedserve.policy import IllegalPlan, Policy, RequestRefused, Step
from pagedserve.policy.batching import Mixed
from pagedserve.validation.decisions import check_decisions

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama as transformers saves it, with its tokenizer."""
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("tiny-llama")
    hf_model("llama").save_pretrained(path)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), eos_token="<|end|>")
    wrapped.save_pretrained(path)
    # As some checkpoints do: an EOS id that the tokenizer does not have.
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, 999]}), encoding="utf-8")
    return path


def llm_of(folder: Path, **options: Any) -> LLM:
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 4, "num_blocks": 64}
    return LLM(folder, dtype="float32", **{**sizes, "max_model_len": 96, "seed": 0, **options})


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    made = llm_of(folder)
    yield made
    made.close()


def test_prompts_as_text_and_as_ids(llm: LLM) -> None:
    """One or many, text or ids, in the order given; the text is the decoded tokens."""
    ids = ids_of("Hello")
    expected = hf_greedy("llama", tuple(ids), 8)
    forms = ["Hello", ids, ["Hello"], [ids], np.array(ids), [np.array(ids)], tuple(ids)]
    for prompts in forms:
        ((completion,),) = llm.generate(cast(Any, prompts), GREEDY)
        assert completion.token_ids == expected
        assert completion.prompt_token_ids == tuple(ids)
    many = llm.generate(["Hello", "a", "Hello, world"], GREEDY)
    assert [group[0].prompt_token_ids for group in many] == [
        tuple(ids_of(text)) for text in ("Hello", "a", "Hello, world")
    ]
    assert llm.generate([], GREEDY) == []


def test_parameters_for_each_prompt(llm: LLM) -> None:
    """One for all, one for each, n samples for some; the progress bar changes nothing."""
    each = [GREEDY, SamplingParams(n=3, seed=5, max_tokens=4, ignore_eos=True)]
    groups = llm.generate(["one", "two"], each, progress=True)
    assert [len(group) for group in groups] == [1, 3]
    assert [completion.index for completion in groups[1]] == [0, 1, 2]
    assert llm.generate(["one", "two"], each) != groups, "request ids go on"
    assert llm.generate("two", each[1])[0][1].token_ids == groups[1][1].token_ids
    with pytest.raises(ValueError, match="1 sampling params for 2 prompts"):
        llm.generate(["one", "two"], [GREEDY])


@pytest.mark.parametrize("prompts", [[["a"]], [1, "a"], ["a", 1], [[1.5]], [None], ["a", [None]]])
def test_what_is_no_prompt_is_named(llm: LLM, prompts: Any) -> None:
    """Text or ids, nothing else; the message names the place."""
    with pytest.raises(ValueError, match=r"prompts\[[01]\] is neither text nor a list of token ids"):
        llm.generate(prompts, GREEDY)
    assert not llm.engine.has_work


def test_a_refused_prompt_leaves_no_other_behind(llm: LLM) -> None:
    """The third of four prompts can never run: nothing of the call runs, now or in the next one."""
    with pytest.raises(RequestRefused, match="96 prompt tokens; max_model_len is 96"):
        llm.generate(["one", "two", "x" * 96, "four"], GREEDY)
    assert llm.engine.num_live == 0
    assert not llm.engine.has_work
    ((completion,),) = llm.generate("five", GREEDY)
    assert completion.token_ids == hf_greedy("llama", tuple(ids_of("five")), 8)
    assert llm.record().requests.column("finish_reason").to_pylist() == ["abort", "abort", "length"]


def test_the_end_mark_ends_the_output(llm: LLM) -> None:
    """EOS ids come from the folder; what was decided for the user is said."""
    assert llm.engine.vocabulary.eos_token_ids == frozenset([EOS])
    assert llm.engine.vocabulary.size == NUM_TOKENS
    assert any(line.startswith("float32") for line in llm.decisions)
    with scripted(llm.engine, lambda request: [*ids_of("hi"), EOS, *ids_of("more")]):
        ((completion,),) = llm.generate("say", SamplingParams(temperature=0.0, max_tokens=20))
    assert (completion.text, completion.finish_reason, completion.stop) == ("hi", "stop", EOS)
    assert completion.token_ids == (*ids_of("hi"), EOS)


def test_more_positions_than_the_model_has_are_refused(folder: Path) -> None:
    """Its config says 256."""
    for load in (llm_of, load_model):
        with pytest.raises(ValueError, match="max_model_len is 300; the model has 256 positions: lower it"):
            load(folder, max_model_len=300)


class NewcomersNever:
    """A rule that schedules nothing."""

    def compose(self, step: Step) -> None:
        """Leave everybody waiting."""


class OnlyShort:
    """A rule that admits short prompts only."""

    def compose(self, step: Step) -> None:
        """Leave long prompts waiting."""
        step.decode()
        for state in step.waiting():
            if state.request.num_prompt_tokens < 10:
                step.admit(state)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_rule_that_leaves_requests_waiting_is_told(folder: Path, depth: int) -> None:
    """No hang: an error that says how many wait; what could run has run; and the next call works."""
    llm = llm_of(folder, policy=Policy(batching=OnlyShort()), overlap_depth=depth)
    with pytest.raises(IllegalPlan, match="nothing while 2 requests wait and nothing runs"):
        llm.generate(["short", "much too long for it", "so is this one, too"], GREEDY)
    ((completion,),) = llm.generate("short", GREEDY)
    assert completion.token_ids == hf_greedy("llama", tuple(ids_of("short")), 8)
    reasons = llm.record().requests.column("finish_reason").to_pylist()
    assert reasons == ["length", "abort", "abort", "length"]
    llm.close()
    llm = llm_of(folder, policy=Policy(batching=NewcomersNever()), overlap_depth=depth)
    with pytest.raises(IllegalPlan, match="nothing while 1 requests wait"):
        llm.generate("short", GREEDY)
    llm.close()


class WakesLater:
    """A rule that collects requests for a while and names the time."""

    def compose(self, step: Step) -> None:
        """Serve what is older than 30 ms."""
        waiting = step.next_waiting()
        if waiting is not None and step.now_ns < waiting.request.arrival_ns + 30_000_000:
            step.wake_at(waiting.request.arrival_ns + 30_000_000)
        else:
            Mixed().compose(step)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_rule_that_waits_is_waited_for(folder: Path, depth: int) -> None:
    """The call sleeps until the time that the rule named, and the simulator does the same."""
    spec = Policy(batching=WakesLater())
    llm = llm_of(folder, policy=spec, overlap_depth=depth)
    groups = llm.generate(["one", "two"], GREEDY)
    assert [completion.finish_reason for (completion,) in groups] == ["length", "length"]
    assert check_decisions(llm.record(), spec).first_difference is None
    llm.close()


def press_ctrl_c(llm: LLM, num_steps: int) -> None:
    """Interrupt the engine in the middle of its n-th step."""
    wait, count = llm.engine.runner.wait, 0

    def interrupted() -> Any:
        nonlocal count
        count += 1
        if count == num_steps:
            signal.raise_signal(signal.SIGINT)
        return wait()

    llm.engine.runner.wait = interrupted


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_an_interrupt_lets_the_engine_go_on(folder: Path, num_steps: int, depth: int) -> None:
    """Ctrl-C in the middle of a step, as in a notebook: the call ends, and the next one is as new."""
    llm = llm_of(folder, policy="vllm_v1", overlap_depth=depth)
    before = signal.getsignal(signal.SIGINT)
    press_ctrl_c(llm, num_steps)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["one", "two", "three"], GREEDY)
    assert signal.getsignal(signal.SIGINT) is before
    assert llm.engine.num_live == 0
    assert_drained(llm.engine)
    ((completion,),) = llm.generate("three", GREEDY)
    assert completion.token_ids == hf_greedy("llama", tuple(ids_of("three")), 8)
    assert check_decisions(llm.record(), "vllm_v1").first_difference is None
    llm.close()


def test_interrupts_elsewhere_act_at_once() -> None:
    """Between steps Ctrl-C acts at once; in another thread nothing is touched."""
    state = InterruptsState()
    with state.holding():
        with state.step():
            """Nothing."""
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    seen: list[Any] = []

    def elsewhere() -> None:
        with state.holding(), state.step():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]


def test_generation_from_a_thread(llm: LLM) -> None:
    """A notebook's or a server's thread: the same output, and no signal is touched."""
    outputs: list[Sequence[int]] = []
    thread = threading.Thread(target=lambda: outputs.append(llm.generate("Hello", GREEDY)[0][0].token_ids))
    thread.start()
    thread.join()
    assert outputs == [hf_greedy("llama", tuple(ids_of("Hello")), 8)]


def test_a_pool_beyond_memory_is_refused(folder: Path) -> None:
    """Before it is allocated, with what would fit."""
    with pytest.raises(
        PoolTooLarge, match=r"num_blocks 1000000000000: .* GiB are free: at most \d+ would fit"
    ):
        llm_of(folder, num_blocks=10**12)


def test_a_closed_llm_says_so(folder: Path) -> None:
    """Not a word of thread pools."""
    llm = llm_of(folder, overlap_depth=1)
    llm.generate("Hello", GREEDY)
    llm.close()
    with pytest.raises(EngineDead, match="the engine has stopped: it was closed; make a new one"):
        llm.generate("Hello", GREEDY)
    assert llm.record().requests.num_rows == 1


def test_an_interrupt_while_prompts_are_taken_in_leaves_none_behind(llm: LLM) -> None:
    """What had been handed in does not run in the next call."""

    def interrupted(text: str) -> list[int]:
        if text == "three":
            raise KeyboardInterrupt
        return ids_of(text)

    llm.engine.intake.vocabulary = replace(llm.engine.vocabulary, encode=interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["one", "two", "three"], GREEDY)
    assert not llm.engine.has_work
    llm.generate("four", GREEDY)
    assert llm.record().requests.column("finish_reason").to_pylist() == ["abort", "abort", "length"]


def test_options_of_loading_are_refused_for_a_loaded_model(folder: Path) -> None:
    """They would have no effect."""
    loaded = load_model(folder, dtype="float32")
    options: list[dict[str, Any]] = [{"dtype": "bfloat16"}, {"device": "cuda"}, {"attention": "reference"}]
    for option in options:
        with pytest.raises(
            ValueError, match="loaded already; give dtype, device and attention to load_model"
        ):
            LLM(loaded, **option)
    LLM(loaded, num_blocks=8).close()


def test_the_record_tells_the_seed(folder: Path) -> None:
    """Also one that was drawn: given again, it gives the same output."""
    params = SamplingParams(temperature=1.5, max_tokens=8, ignore_eos=True)
    assert llm_of(folder).record().header["seed"] == 0
    first, other = llm_of(folder, seed=None), llm_of(folder, seed=None)
    seed = first.record().header["seed"]
    assert seed != other.record().header["seed"]
    again = llm_of(folder, seed=seed)
    outputs = [llm.generate("Hello", params)[0][0].token_ids for llm in (first, other, again)]
    assert outputs[0] == outputs[2] != outputs[1]
