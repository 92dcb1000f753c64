"""What a profile measures: the grid covers what it says, and what an engine's limits leave out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagedserve.engine.profile_grid import GRIDS, SPLIT_TOKENS, Grid, Point, skewed
from pagedserve.policy import Limits, StepShape

LIMITS = Limits(max_num_batched_tokens=64, max_num_seqs=8, max_model_len=96, block_size=4, num_blocks=128)
GRID = Grid((1, 8, 32), (0, 20), (1, 3, 6), (4, 40), (16,), (2,), (1, 4))


@pytest.mark.parametrize("name", GRIDS)
def test_grids_cover_chunks_decodes_even_and_skewed_and_both_together(name: str) -> None:
    grid = GRIDS[name]
    limits = Limits(512, 64, 4096, 16, 16384)
    points, (fitting, rows) = grid.points(limits), grid.fitting(limits)
    left_out = [point for point in points if point not in fitting]
    assert all(len(p.decodes) == 64 and p.chunks for p in left_out), "what an engine has by default has room"
    assert len({point.shape for point in points}) == len(points)
    by_kind: dict[str, list[Point]] = {}
    for point in points:
        by_kind.setdefault(point.kind, []).append(point)
    assert set(by_kind) == {"chunk", "unsampled", "split", "decode", "mixed"}
    assert {p.chunks for p in by_kind["chunk"]} == {
        ((tokens, context),) for tokens in grid.chunk_tokens for context in grid.chunk_contexts
    }
    assert {p.chunks for p in by_kind["unsampled"]} == {((tokens, 0),) for tokens in grid.chunk_tokens}
    assert {p.shape.num_samples for p in by_kind["unsampled"]} == {0}
    assert {p.chunks for p in by_kind["split"]} == {((SPLIT_TOKENS, 0),) * n for n in grid.split_chunks}
    even = {(len(p.decodes), p.decodes[0]) for p in by_kind["decode"] if len(set(p.decodes)) == 1}
    assert even == {(batch, context) for batch in grid.decode_batches for context in grid.decode_contexts}
    uneven = [p.shape for p in by_kind["decode"] if len(set(p.decodes)) > 1]
    pairs = {(shape.num_decodes, shape.decode_context_sum // shape.num_decodes) for shape in uneven}
    assert pairs == {(batch, context) for batch, context in even if batch > 2}
    for shape in uneven:
        half = min(shape.decode_context_sum // 2, 4094)
        assert half - shape.num_decodes < shape.decode_context_max <= max(half + shape.num_decodes, 4094)
    assert {(len(p.decodes), p.chunks[0][0]) for p in by_kind["mixed"]} == {
        (batch, tokens) for batch in grid.decode_batches for tokens in grid.mixed_chunks
    }
    assert rows == list(grid.host_rows)


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 32])
@pytest.mark.parametrize("context", [1, 2, 16, 333])
@pytest.mark.parametrize("longest", [300, 400, 5000])
def test_skewed_keeps_the_sum_and_the_longest(batch: int, context: int, longest: int) -> None:
    contexts = skewed(batch, context, longest)
    assert len(contexts) == batch
    assert sum(contexts) == batch * context
    assert min(contexts) >= 1
    assert max(contexts) <= max(longest, context)
    assert max(contexts) == contexts[-1]


def test_what_does_not_fit_is_left_out_and_nothing_else() -> None:
    assert [point.kind for point in GRID.points(LIMITS) if not point.fits(LIMITS)] == []
    few = Limits(max_num_batched_tokens=24, max_num_seqs=3, max_model_len=30, block_size=4, num_blocks=10)
    points, rows = GRID.fitting(few)
    assert {point.shape for point in points} == {
        *(
            StepShape(((tokens, context),), num_samples=1)
            for tokens, context in ((1, 0), (1, 20), (8, 0), (8, 20))
        ),
        *(StepShape(((tokens, 0),)) for tokens in (1, 8)),
        StepShape((), 1, 4, 4, 16, 1),
        StepShape((), 3, 12, 4, 48, 3),
        StepShape((), 3, 12, 6, 54, 3),
    }
    assert rows == [1]
    for point in set(GRID.points(LIMITS)) - set(points):
        lengths = [*(n + c for n, c in point.chunks), *(c + 1 for c in point.decodes)]
        assert (
            max(lengths) > 29
            or len(lengths) > 3
            or sum(-(-length // 4) for length in lengths) > 10
            or point.shape.num_tokens > 24
        )


@pytest.mark.parametrize(
    ("point", "least"),
    [
        (Point("chunk", (), ((8, 20),)), Limits(8, 1, 29, 4, 7)),
        (Point("mixed", (7, 3), ((5, 2),)), Limits(7, 3, 9, 4, 5)),
    ],
    ids=str,
)
def test_a_step_fits_limits_of_its_own_size_and_none_smaller(point: Point, least: Limits) -> None:
    assert point.fits(least)
    for name in ("max_num_batched_tokens", "max_model_len", "num_blocks"):
        assert not point.fits(replace(least, **{name: getattr(least, name) - 1})), name
    if least.max_num_seqs > 1:
        assert not point.fits(replace(least, max_num_seqs=least.max_num_seqs - 1))
