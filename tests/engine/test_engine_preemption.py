"""Recompute preemption never shows in the output: forced at every position, before and after the rule's choice."""

from collections.abc import Sequence

import pytest
from engine_models import (
    KINDS,
    Heard,
    assert_drained,
    drain,
    engine_of,
    greedy,
    hf_greedy,
    prompts,
    run_all,
    small_limits,
    tiny_model,
)
from engine_rules import PreemptAt, PreemptAtRandom

from pagedserve.metrics.summary import summarize
from pagedserve.policy import IllegalPlan, Policy, Step
from pagedserve.policy.batching import Mixed

NUM_TOKENS = 12
CACHES = (False, True)
DEPTHS = (0, 1)


def check_outputs(kind: str, texts: Sequence[tuple[int, ...]], outputs: Sequence[Sequence[int]]) -> None:
    for text, output in zip(texts, outputs, strict=True):
        assert tuple(output) == hf_greedy(kind, text, NUM_TOKENS), f"prompt {text}"


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("caches", CACHES)
def test_b2_forced_preemption_at_every_output_position(caches: bool, depth: int, after: bool) -> None:
    """B2: wherever it is preempted, a request brings the tokens of the run without preemption, each once."""
    texts = prompts(4, 6)
    for position in range(NUM_TOKENS):
        rule = PreemptAt(1, position, after)
        spec = Policy(batching=rule, enable_prefix_caching=caches)
        with engine_of(spec, depth=depth) as engine:
            heard = Heard()
            states = [engine.submit(text, greedy(NUM_TOKENS), heard)[0] for text in texts]
            drain(engine)
            assert engine.scheduler.num_preemptions == 1
            rows = engine.record().requests.to_pylist()
            assert_drained(engine)
        check_outputs("llama", texts, [heard.tokens(state.sequence.request.id) for state in states])
        for state, row in zip(states, rows, strict=True):
            completion = state.completion()
            assert heard.tokens(completion.request) == list(completion.token_ids)
            assert row["num_output_tokens"] == len(completion.token_ids) == NUM_TOKENS
            assert row["num_prompt_tokens"] == len(completion.prompt_token_ids)
            assert row["num_preemptions"] == int(completion.request == 1)


@pytest.mark.parametrize("depth", DEPTHS)
def test_b2_forced_preemption_of_a_request_alone(depth: int) -> None:
    """B2: nothing else runs, so the step that preempts is empty; the request resumes all the same."""
    text = prompts(4, 6)[1]
    for position in range(1, NUM_TOKENS):
        with engine_of(Policy(batching=PreemptAt(0, position)), depth=depth) as engine:
            (completion,) = run_all(engine, [text], greedy(NUM_TOKENS))
            assert engine.scheduler.num_preemptions == 1
        check_outputs("llama", [text], [completion.token_ids])


@pytest.mark.parametrize("depth", DEPTHS)
def test_b2_preemption_between_prefill_chunks(depth: int) -> None:
    """B2, B5: preempted with part of its prompt computed, and with no output yet."""
    texts = prompts(5, 6, longest=60)
    for computed in (1, 9, 17, 33):
        rule = PreemptAt(3, 0, num_computed=computed)
        limits = small_limits(max_num_batched_tokens=9)
        with engine_of(Policy(batching=rule, enable_prefix_caching=True), limits, depth=depth) as engine:
            completions = run_all(engine, texts, greedy(NUM_TOKENS))
        check_outputs("llama", texts, [completion.token_ids for completion in completions])


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_b2_storms_of_preemptions(kind: str, depth: int) -> None:
    """B2: every running request may be preempted in every step, before and after the rule has chosen."""
    texts = prompts(7, 7)
    num_preemptions = 0
    for seed in range(3):
        spec = Policy(batching=PreemptAtRandom(seed, 0.06), enable_prefix_caching=seed > 0)
        limits = small_limits(max_num_batched_tokens=23)
        with engine_of(spec, limits, model=tiny_model(kind), depth=depth) as engine:
            completions = run_all(engine, texts, greedy(NUM_TOKENS))
            num_preemptions += engine.scheduler.num_preemptions
        check_outputs(kind, texts, [completion.token_ids for completion in completions])
    assert num_preemptions > 20


def test_b2_the_first_token_is_counted_once() -> None:
    """B2: TTFT belongs to the first token, not to the first after a preemption."""
    text = prompts(4, 6)[1]
    with engine_of(Policy(batching=PreemptAt(0, 5))) as engine:
        run_all(engine, [text], greedy(NUM_TOKENS))
        record = engine.record()
    steps = record.steps.to_pylist()
    emitted = sorted(record.emissions.filter(record.array("emissions", "request") == 0).to_pylist(), key=str)
    assert sum(row["num_steps"] for row in emitted) == NUM_TOKENS
    assert min(row["first_step"] for row in emitted) == 0
    assert steps[0]["num_prefill_tokens"] == len(text)
    assert summarize(record) is not None


def test_b3_a_resumed_sequence_computes_what_the_cache_lacks() -> None:
    """B3: its blocks stayed cached, so resuming computes the rest only, and its block table is whole."""
    text = tuple(range(21))
    spec = Policy(batching=PreemptAt(0, 6), enable_prefix_caching=True)
    with engine_of(spec) as engine:
        (completion,) = run_all(engine, [text], greedy(NUM_TOKENS))
        plans = engine.record().plans
    check_outputs("llama", [text], [completion.token_ids])
    assert plans is not None
    (resumed,) = [row for row in plans.to_pylist() if row["preempted"]]
    # 21 + 6 known tokens, of which 26 were computed: six full blocks of four are hit.
    assert resumed["chunk_starts"] == [24]
    assert resumed["chunk_tokens"] == [3]
    assert resumed["block_counts"] == [7]


def test_a_rule_cannot_preempt_what_does_not_run() -> None:
    """A wrong preemption names the rule and the request, and no step is launched."""

    class Twice:
        def compose(self, step: Step) -> None:
            Mixed().compose(step)
            for state in list(step.running):
                step.preempt(state)
                step.preempt(state)

    with engine_of(Policy(batching=Twice())) as engine:
        engine.submit([1, 2, 3], greedy(2))
        with pytest.raises(IllegalPlan, match="Twice preempted request 0, which is preempted"):
            engine.step()
