"""Steps launched before the one before is waited for: when they are, when they may not, and that nothing changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from engine_models import (
    drain,
    engine_of,
    greedy,
    hf_greedy,
    prompts,
    run_all,
    small_limits,
)
from engine_rules import PreemptAt

from pagedserve.engine.engine import Engine
from pagedserve.engine.params import SamplingParams
from pagedserve.engine.structured_outputs import StructuredOutputs
from pagedserve.policy import Policy, StepPlan

FORM = StructuredOutputs(regex="[a-f]+")
NEEDS_TOKENS = {
    "form": {"structured_outputs": FORM},
    "repetition": {"repetition_penalty": 1.5},
    "presence": {"presence_penalty": 0.5},
    "frequency": {"frequency_penalty": 0.5},
}
NEEDS_NONE: dict[str, dict[str, Any]] = {
    "greedy": {},
    "bias": {"logit_bias": {17: 4.0}},
    "allowed": {"allowed_token_ids": list(range(50))},
    "min_tokens": {"min_tokens": 4, "stop_token_ids": [5]},
    "logprobs": {"logprobs": 2},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "hot": {"temperature": 1.0, "top_p": 0.9, "seed": 3},
}


class Spy:
    """The verbs of an engine's scheduler and runner in their order, as (verb, step)."""

    def __init__(self, engine: Engine) -> None:
        self.verbs: list[tuple[str, int]] = []
        runner, scheduler = engine.runner, engine.scheduler
        launch, wait, schedule, commit = runner.launch, runner.wait, scheduler.schedule, scheduler.commit
        waited = 0

        def launched(plan: StepPlan) -> None:
            assert plan.step is not None
            self.verbs.append(("launch", plan.step))
            launch(plan)

        def waited_for() -> Any:
            nonlocal waited
            self.verbs.append(("wait", waited))
            waited += 1
            return wait()

        def scheduled(now_ns: int) -> StepPlan:
            plan = schedule(now_ns)
            if plan.step is not None:
                self.verbs.append(("schedule", plan.step))
            return plan

        def committed(step: int, outcomes: Any, now_ns: int) -> Any:
            self.verbs.append(("commit", step))
            return commit(step, outcomes, now_ns)

        runner.launch, runner.wait = launched, waited_for  # pyright: ignore[reportAttributeAccessIssue]
        scheduler.schedule, scheduler.commit = scheduled, committed

    def ahead(self) -> list[int]:
        """Steps launched before the step before them was waited for."""
        place = {verb: index for index, verb in enumerate(self.verbs)}
        steps = [step for verb, step in self.verbs if verb == "launch" and step]
        return [step for step in steps if place["launch", step] < place["wait", step - 1]]


def watched_run(
    texts: Sequence[tuple[int, ...]], params: list[SamplingParams], depth: int
) -> tuple[Spy, list[tuple[int, ...]]]:
    with engine_of("mixed", depth=depth) as engine:
        spy = Spy(engine)
        completions = [engine.submit(text, own)[0] for text, own in zip(texts, params, strict=True)]
        drain(engine)
        return spy, [state.completion().token_ids for state in completions]


def test_at_depth_1_every_step_is_launched_before_the_one_before_is_waited_for() -> None:
    """The scheduler's verbs keep their order: a step is planned, then the one before is committed."""
    texts = prompts(4, 60)
    spy, outputs = watched_run(texts, [greedy(9)] * 4, 1)
    last = spy.verbs[-1][1]
    assert spy.ahead() == list(range(1, last + 1))
    expected = [("schedule", 0), ("launch", 0)]
    for step in range(1, last + 1):
        expected += [("schedule", step), ("launch", step), ("wait", step - 1), ("commit", step - 1)]
    assert spy.verbs == [*expected, ("wait", last), ("commit", last)]
    assert outputs == [hf_greedy("llama", text, 9) for text in texts]


def test_at_depth_0_none_is() -> None:
    spy, _ = watched_run(prompts(4, 60), [greedy(9)] * 4, 0)
    assert not spy.ahead()


@pytest.mark.parametrize("name", NEEDS_TOKENS)
def test_a_row_that_needs_its_tokens_on_the_host_waits_for_them(name: str) -> None:
    """Its first token needs none of its own, so the step behind its last chunk is the first that waits."""
    texts = (prompts(2, 60)[1] * 4)[:30], (1, 2, 3)
    params = [greedy(6, **NEEDS_TOKENS[name]), greedy(12)]
    spy, outputs = watched_run(texts, params, 1)
    last = spy.verbs[-1][1]
    # Step 0 samples both; the first ends with its sixth token in step 5.
    assert spy.ahead() == list(range(6, last + 1))
    assert spy.verbs[2:6] == [("schedule", 1), ("wait", 0), ("commit", 0), ("launch", 1)]
    _, expected = watched_run(texts, params, 0)
    assert outputs == expected


@pytest.mark.parametrize("name", NEEDS_NONE)
def test_other_rows_do_not(name: str) -> None:
    texts, params = prompts(2, 60), [SamplingParams(**{**_base(), **NEEDS_NONE[name]})] * 2
    spy, outputs = watched_run(texts, params, 1)
    assert spy.ahead() == list(range(1, spy.verbs[-1][1] + 1))
    _, expected = watched_run(texts, params, 0)
    assert outputs == expected


def _base() -> dict[str, Any]:
    return {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}


def test_a_step_with_a_first_token_that_a_grammar_chooses_is_launched_ahead() -> None:
    """Nothing of that request is in flight, though chunks of it are; what its neighbours have does not matter."""
    with engine_of("mixed", small_limits(max_num_batched_tokens=16), depth=1) as engine:
        spy = Spy(engine)
        engine.submit([1, 2, 3], greedy(9))
        engine.step()
        engine.submit(list(range(24)), greedy(3, structured_outputs=FORM))
        drain(engine)
        # Its tokens come from steps 2 to 4; its neighbour's go on to step 8.
        assert spy.ahead() == [1, 2, 5, 6, 7, 8]


def test_the_record_counts_a_step_from_when_the_device_had_it_to_itself() -> None:
    """From its hand-over, or from the commit of the one before if that came later."""
    with engine_of("mixed", depth=1) as engine:
        spy = Spy(engine)
        for text, max_tokens in zip(prompts(3, 61), (4, 9, 12), strict=True):
            engine.submit(text, greedy(max_tokens, presence_penalty=0.5 * (max_tokens == 4)))
        drain(engine)
        record = engine.record()
    launch, commit = record.array("steps", "launch_ns"), record.array("steps", "commit_ns")
    ahead = np.isin(np.arange(1, len(launch)), spy.ahead())
    assert 0 < ahead.sum() < len(ahead)
    assert (launch[1:][ahead] == commit[:-1][ahead]).all()
    assert (launch[1:][~ahead] > commit[:-1][~ahead]).all()
    assert (launch < commit).all()


@pytest.mark.parametrize("num_outputs", [1, 2, 5])
@pytest.mark.parametrize("after", [False, True])
def test_a_victim_in_flight_is_resumed_with_the_token_that_was(num_outputs: int, after: bool) -> None:
    """It is preempted by the plan behind the step that samples its token, and recomputes that one too."""
    texts = prompts(3, 64)
    spec = Policy(batching=PreemptAt(1, num_outputs, after=after))
    with engine_of(spec, depth=1) as engine:
        spy = Spy(engine)
        completions = run_all(engine, texts, greedy(9))
        assert engine.scheduler.num_preemptions == 1
        assert len(spy.ahead()) >= 9
    assert [made.token_ids for made in completions] == [hf_greedy("llama", text, 9) for text in texts]
