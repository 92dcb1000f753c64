"""Shared KV blocks hold what their keys say: greedy output equals transformers' whatever was cached before."""

from collections.abc import Sequence

import pytest
import torch
from engine_models import (
    assert_drained,
    drain,
    engine_of,
    greedy,
    hf_greedy,
    hf_model,
    ids_of,
    prompts,
    run_all,
    scripted,
    small_limits,
)

from pagedserve.engine import runner
from pagedserve.engine.engine import Engine
from pagedserve.engine.keys import KeyFunction, PrefixKeys
from pagedserve.engine.outputs import Completion
from pagedserve.policy.blocks import PagedAllocator

LENGTH = 8
DEPTHS = (0, 1)
SIZE = 4
FIRST = tuple(range(40, 40 + 4 * SIZE))


def hits(engine: Engine) -> list[int]:
    """Prompt tokens found in the cache, request by request; ends the engine's record."""
    return engine.record().requests.column("num_prefix_hit_tokens").to_pylist()


def check(completions: Sequence[Completion], length: int = LENGTH) -> None:
    for completion in completions:
        assert completion.token_ids == hf_greedy("llama", completion.prompt_token_ids, length)


def check_keys(engine: Engine) -> None:
    """Every key of the cache is that of the tokens whose KV the block holds: the KV equals a fresh one's."""
    allocator = engine.scheduler.allocator
    assert isinstance(allocator, PagedAllocator)
    for block, key in allocator._key_of.items():
        assert allocator._block_of[key] == block


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("num_blocks", [1, 2, 4])
def test_b4_a_cached_prompt_of_whole_blocks_leaves_a_token_to_compute(num_blocks: int, depth: int) -> None:
    """B4: everything is cached, yet the last block is computed again, with the cold run's logits."""
    text = FIRST[: num_blocks * SIZE]
    with engine_of("vllm_v1", depth=depth) as engine:
        cold, warm, again = (run_all(engine, [text], greedy(LENGTH, logprobs=5))[0] for _ in range(3))
        found = hits(engine)
    check([cold, warm, again])
    # Between them `run_all` sends a probe of one token.
    assert found[::2] == [0, (num_blocks - 1) * SIZE, (num_blocks - 1) * SIZE]
    assert cold.logprobs
    assert warm.logprobs
    for one, other in zip(cold.logprobs, warm.logprobs, strict=True):
        assert one.chosen.logprob == pytest.approx(other.chosen.logprob, abs=1e-5)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("freed_first", [0, 1])
def test_b6_two_requests_with_one_new_prefix_in_the_same_step(freed_first: int, depth: int) -> None:
    """B6: both compute it; whichever goes first, later requests with that prefix are right."""
    texts = [(*FIRST, 1, 2), (*FIRST, 3, 4)]
    with engine_of("vllm_v1", small_limits(num_blocks=24), depth=depth) as engine:
        states = [engine.submit(text, greedy(LENGTH))[0] for text in texts]
        engine.step()
        engine.step()
        engine.abort(states[freed_first].sequence.request.id)
        third = [engine.submit((*FIRST, 5), greedy(LENGTH))[0] for _ in range(2)]
        drain(engine)
        check_keys(engine)
        check([states[1 - freed_first].completion(), *(state.completion() for state in third)])
        # Fill the pool with other text, then come back.
        check(run_all(engine, prompts(6, 21), greedy(LENGTH)))
        check(run_all(engine, texts, greedy(LENGTH)))
        check_keys(engine)


@pytest.mark.parametrize("depth", DEPTHS)
def test_b7_an_evicted_block_loses_its_key(depth: int) -> None:
    """B7: once its blocks were reused for other text, the first prompt is a miss, and right."""
    with engine_of("vllm_v1", small_limits(num_blocks=12, max_num_seqs=1), depth=depth) as engine:
        check(run_all(engine, [FIRST], greedy(LENGTH)))
        check(run_all(engine, [FIRST], greedy(LENGTH)))
        others = [tuple(range(start, start + 5 * SIZE)) for start in (100, 150, 200)]
        check(run_all(engine, others, greedy(LENGTH)))
        check(run_all(engine, [FIRST], greedy(LENGTH)))
        check_keys(engine)
        found = hits(engine)
    assert found[2] == 3 * SIZE
    assert found[8] == 0, found


def constant_key(parent: bytes, tokens: bytes) -> bytes:
    """Everything collides."""
    return bytes(32)


def blind_to_parents(parent: bytes, tokens: bytes) -> bytes:
    """The same block behind another prefix collides."""
    return tokens.ljust(32)


def blind_to_tokens(parent: bytes, tokens: bytes) -> bytes:
    """Another block behind the same prefix collides."""
    return parent.ljust(32)


@pytest.mark.parametrize("function", [constant_key, blind_to_parents, blind_to_tokens])
def test_b8_a_colliding_key_function_is_refused_at_the_start(
    function: KeyFunction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B8: an engine with a key function that collides does not start, and the message names the function."""
    monkeypatch.setattr(runner, "PrefixKeys", lambda block_size: PrefixKeys(block_size, function))
    with (
        pytest.raises(ValueError, match=f"key function '{function.__name__}' gave [12345] different keys"),
        engine_of("vllm_v1"),
    ):
        pass
    with engine_of("mixed"):
        """Without a prefix cache there are no keys."""


@pytest.mark.parametrize("depth", DEPTHS)
def test_b9_abort_right_after_each_chunk_then_send_again(depth: int) -> None:
    """B9: what a chunk filled is found only if it was computed; the output is right whenever it was aborted."""
    text = prompts(3, 22, longest=60)[-1] + FIRST
    for num_steps in range(1, 12):
        limits = small_limits(max_num_batched_tokens=8)
        with engine_of("vllm_v1", limits, depth=depth) as engine:
            (state,) = engine.submit(text, greedy(LENGTH))
            for _ in range(num_steps):
                engine.step()
            engine.abort(state.sequence.request.id)
            # In the same turn as the abort, while the aborted step may still be in flight.
            (second,) = engine.submit(text, greedy(LENGTH))
            drain(engine)
            check([second.completion(), *run_all(engine, [text], greedy(LENGTH))])
            found = hits(engine)
        assert found[2] == (len(text) - 1) // SIZE * SIZE


def test_b9_blocks_of_a_step_in_flight_are_not_found() -> None:
    """B9: a request that comes while the step that fills the blocks is in flight computes them itself."""
    with engine_of("vllm_v1", depth=1) as engine:
        engine.submit(FIRST, greedy(LENGTH))
        engine.step()
        assert engine.scheduler.in_flight
        (second,) = engine.submit(FIRST, greedy(LENGTH))
        drain(engine)
        check([second.completion()])
        assert hits(engine) == [0, 0]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("stop_after", range(1, 2 * SIZE + 2))
def test_b11_hits_cover_only_what_was_computed(stop_after: int, depth: int) -> None:
    """B11: the token computed for a request that had stopped is discarded, and its block is not published.

    A turn of a conversation: prompt, output, and more text. The output's last token was sampled and never
    computed at depth 0; at depth 1 its KV came from a discarded row.
    """
    with engine_of("vllm_v1", depth=depth) as engine:
        (state,) = engine.submit(FIRST, greedy(3 * SIZE), stop_after=stop_after)
        drain(engine)
        said = state.completion().token_ids
        assert len(said) == stop_after
        (answer,) = run_all(engine, [(*FIRST, *said, 7, 8, 9, 10, 11)], greedy(LENGTH))
        check([answer])
        computed = len(FIRST) + stop_after - 1
        assert hits(engine)[1] == computed // SIZE * SIZE


@pytest.mark.parametrize("depth", DEPTHS)
def test_b11_a_stop_string_and_an_abort(depth: int) -> None:
    """B11: the same when a string or an abort ends the first turn."""
    said = ids_of("Hello, STOP and more")
    for ends_by_abort in (False, True):
        with engine_of("vllm_v1", depth=depth) as engine:
            with scripted(engine, lambda request: said):
                (state,) = engine.submit(FIRST, greedy(30, stop=() if ends_by_abort else "STOP"))
                while len(state.token_ids) < 11:
                    engine.step()
                if ends_by_abort:
                    engine.abort(state.sequence.request.id)
                drain(engine)
            assert state.completion().token_ids == tuple(said[:11])
            turns = [(*FIRST, *said[:count], 7, 8) for count in (9, 10, 11, 12)]
            check(run_all(engine, turns, greedy(LENGTH)))
            assert max(hits(engine)) <= (len(FIRST) + 10) // SIZE * SIZE


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_same_block_behind_another_prefix_is_another_block(depth: int) -> None:
    """A key stands for all tokens up to the block's end, or attention would see foreign keys and values."""
    other = (*range(200, 200 + SIZE), *FIRST[SIZE:])
    shifted = FIRST[SIZE:]
    with engine_of("vllm_v1", depth=depth) as engine:
        check(run_all(engine, [FIRST], greedy(LENGTH)))
        check(run_all(engine, [other, shifted], greedy(LENGTH)))
        assert not any(hits(engine))


@pytest.mark.parametrize("depth", DEPTHS)
def test_salts_share_nothing(depth: int) -> None:
    """Requests of different salts never meet in the cache; those of one salt do."""
    with engine_of("vllm_v1", depth=depth) as engine:
        states = []
        for salt in (None, "a", "b", "a", None):
            states += engine.submit(FIRST, greedy(LENGTH), cache_salt=salt)
            drain(engine)
        assert hits(engine) == [0, 0, 0, 3 * SIZE, 3 * SIZE]
        check([state.completion() for state in states])


@pytest.mark.parametrize("depth", DEPTHS)
def test_samples_of_one_prompt_share_it_through_the_cache(depth: int) -> None:
    """n = 3 is three requests; those admitted after the first has computed the prompt find it."""
    with engine_of("vllm_v1", small_limits(max_num_seqs=1), depth=depth) as engine:
        states = engine.submit(FIRST, greedy(LENGTH, n=3))
        drain(engine)
        check([state.completion() for state in states])
        assert hits(engine) == [0, 3 * SIZE, 3 * SIZE]


@pytest.mark.parametrize("depth", DEPTHS)
def test_cached_kv_equals_kv_computed_afresh(depth: int) -> None:
    """After a mixed workload, every block still under a key holds the KV that transformers computes for it.

    The keys say which tokens those are: every prefix of every text that ran is looked up.
    """
    with engine_of("vllm_v1", small_limits(num_blocks=48), depth=depth) as engine:
        completions = run_all(engine, prompts(9, 23), greedy(LENGTH))
        keys, allocator = engine.runner.keys, engine.scheduler.allocator
        assert keys is not None
        assert isinstance(allocator, PagedAllocator)
        seen: set[int] = set()
        for completion in completions:
            tokens = completion.prompt_token_ids + completion.token_ids
            chain: list[bytes] = []
            keys.extend(chain, keys.root(None), tokens, len(tokens) // SIZE)
            with torch.inference_mode():
                cache = hf_model("llama")(torch.tensor([tokens]), use_cache=True).past_key_values
            for index, key in enumerate(chain):
                block = allocator._block_of.get(key)
                if block is None:
                    continue
                seen.add(block)
                part = slice(index * SIZE, (index + 1) * SIZE)
                for number, layer in enumerate(cache.layers):
                    ours = engine.runner.kv.layer(number)[block]
                    theirs = torch.stack((layer.keys[0, :, part], layer.values[0, :, part]))
                    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
        assert len(seen) == len(allocator._key_of) > 20
        assert_drained(engine)
