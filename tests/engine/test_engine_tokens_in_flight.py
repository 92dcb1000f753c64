"""Tokens that the host does not know yet: laid out by count, taken from the device by seat, whoever had it before."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from engine_models import (
    assert_drained,
    engine_of,
    greedy,
    hf_greedy,
    prompts,
    small_limits,
    tiny_model,
    vocabulary,
)

from pagedserve.engine.engine import Engine
from pagedserve.engine.output_text import OutputTextState
from pagedserve.engine.runner import ModelRunner
from pagedserve.engine.sequences import MirrorState, SequenceState, SequenceTable
from pagedserve.engine.stops import TokenStops
from pagedserve.policy import Limits, PrefillChunk, Request, Scheduler, StepPlan, policy

RULES = ("static", "prefill_first", "mixed", "vllm_v1")


def runner_of(limits: Limits, texts: Sequence[tuple[int, ...]], max_tokens: int) -> ModelRunner:
    runner = ModelRunner(tiny_model(), limits, vocabulary().size, True, False)
    params = greedy(max_tokens)
    for number, text in enumerate(texts):
        stops = TokenStops.for_request(params, vocabulary().eos_token_ids)
        output = OutputTextState(params, vocabulary().pieces)
        request = Request(number, 0, len(text), max_tokens)
        runner.expect(SequenceState(request, params, list(text), stops, output, seed=0))
    return runner


def test_a_whole_output_is_computed_before_the_host_sees_a_token_of_it() -> None:
    """Every plan is launched, then every step waited for: positions, blocks and tokens need nothing else."""
    texts, limits = prompts(3, 62), small_limits()
    runner, scheduler = runner_of(limits, texts, 7), Scheduler(policy("mixed"), limits)
    sequences = dict(runner._newcomers)
    for number, text in enumerate(texts):
        scheduler.add(Request(number, 0, len(text), 7), number)
    plans, now_ns = [], 10
    while scheduler.has_work:
        plans.append(scheduler.schedule(now_ns))
        runner.launch(plans[-1])
        scheduler.commit(len(plans) - 1, (), now_ns + 1)
        now_ns += 2
    assert [len(sequence.token_ids) for sequence in sequences.values()] == [len(text) for text in texts]
    for _ in plans:
        runner.wait()
    runner.close()
    for number, text in enumerate(texts):
        assert tuple(sequences[number].token_ids[len(text) :]) == hf_greedy("llama", text, 7)


def test_a_chunk_of_tokens_that_are_not_known_is_our_own_mistake() -> None:
    table = SequenceTable[MirrorState](2, 32, 4, torch.device("cpu"))
    request = Request(0, 0, 3, 5)
    plan = StepPlan(0, (request,), (PrefillChunk(0, 0, 4, True),), new_blocks=((0, (1,)),))
    table.apply(plan, {0: MirrorState(request, [7, 8, 9])})
    with pytest.raises(AssertionError, match="of which 3 tokens are known"):
        table.lay_out(plan)


def decode_step(step: int, who: int, **changes: Any) -> StepPlan:
    return StepPlan(step, decodes=(who,), joined=(who,), **changes)


def mirrored(number: int, *token_ids: int) -> tuple[Request, MirrorState]:
    request = Request(number, 0, len(token_ids), 9)
    return request, MirrorState(request, list(token_ids))


def table_of_one_seat() -> SequenceTable[MirrorState]:
    return SequenceTable[MirrorState](1, 32, 4, torch.device("cpu"))


def test_a_seat_taken_over_while_its_former_owner_is_in_flight() -> None:
    """Step 0 writes the old one's token when step 1, which seats the new one, is laid out already."""
    table = table_of_one_seat()
    (old, its), (new, own) = mirrored(0, 11, 12), mirrored(1, 21, 22, 23)
    first = StepPlan(0, (old,), (PrefillChunk(0, 0, 2, True),), new_blocks=((0, (3,)),))
    second = StepPlan(1, (new,), (PrefillChunk(1, 0, 3, True),), departed=(0,), new_blocks=((1, (4,)),))
    third = decode_step(2, 1)
    inputs = []
    for plan in (first, second, third):
        table.apply(plan, {0: its, 1: own})
        inputs.append(table.lay_out(plan))
    batches = []
    for each, sampled in zip(inputs, (91, 92, 93), strict=True):
        batches.append(table.complete(each).token_ids.tolist())
        table.keep(each, torch.tensor([sampled]))
    assert batches == [[11, 12], [21, 22, 23], [92]]
    assert [each.positions.tolist() for each in inputs] == [[2], [3], [4]]
    assert inputs[2].batch.context_lens.tolist() == [3]
    assert table.last_tokens.tolist() == [93]


@pytest.mark.parametrize("has_chunk", [False, True])
def test_who_is_seated_without_a_chunk_goes_on_from_the_last_token_it_has(has_chunk: bool) -> None:
    """As the profiler seats them; behind the former owner's token, which is written later than this is laid out."""
    table = table_of_one_seat()
    (old, its), (new, own) = mirrored(0, 11, 12), mirrored(1, 21, 22, 23)
    first = StepPlan(0, (old,), (PrefillChunk(0, 0, 2, True),), new_blocks=((0, (3,)),))
    second = decode_step(1, 1, new_requests=(new,), departed=(0,), new_blocks=((1, (4,)),))
    if has_chunk:
        chunk = PrefillChunk(1, 0, 3, True)
        second = StepPlan(1, (new,), (chunk,), departed=(0,), new_blocks=((1, (4,)),))
    inputs = []
    for plan in (first, second):
        table.apply(plan, {0: its, 1: own})
        inputs.append(table.lay_out(plan))
    table.complete(inputs[0])
    table.keep(inputs[0], torch.tensor([91]))
    assert inputs[1].seated.tolist() == ([] if has_chunk else [0])
    assert table.complete(inputs[1]).token_ids.tolist() == ([21, 22, 23] if has_chunk else [23])
    assert inputs[1].positions.tolist() == [3]


def seats_taken_over(engine: Engine) -> Callable[[], int]:
    """Counts seats that a plan gives away while a step in flight is to write a token there."""
    table, launch, found = engine.runner.table, engine.runner.launch, 0

    def watched(plan: StepPlan) -> None:
        nonlocal found
        writing = {
            step.sequences[request].seat for step in engine.runner._launched for request in step.sampled
        }
        launch(plan)
        found += sum(sequence.seat in writing for sequence in table.seated)

    engine.runner.launch = watched  # pyright: ignore[reportAttributeAccessIssue]
    return lambda: found


@pytest.mark.parametrize("rule", RULES)
def test_outputs_where_seats_are_taken_over_in_flight(rule: str) -> None:
    """Two seats; stops and aborts free one while its owner's next token is being computed."""
    rng = random.Random(RULES.index(rule))
    texts = prompts(40, 63, longest=12)
    with engine_of(rule, small_limits(max_num_seqs=2), depth=1) as engine:
        taken_over = seats_taken_over(engine)
        states = [
            engine.submit(text, greedy(12), stop_after=rng.choice([None, 1, 3, 7]))[0] for text in texts
        ]
        while engine.has_work:
            engine.step()
            if rng.random() < 0.15 and engine.scheduler.running:
                engine.abort(rng.choice(list(engine.scheduler.running)))
        assert taken_over() > 3 or rule == "static"
        assert_drained(engine)
    ended = {state.finish_reason for state in states}
    assert ended == {"abort", "length", "stop"}
    for text, state in zip(texts, states, strict=True):
        assert tuple(state.token_ids) == hf_greedy("llama", text, 12)[: len(state.token_ids)]
        wanted = state.sequence.stop_after or 12
        assert len(state.token_ids) == wanted or state.finish_reason == "abort"
