"""Recorded decode steps: which sizes there are, that padding is inert, and that an engine on them says the same.

Without a GPU a recording is the function itself, run again on the same buffers; the kernels are interpreted.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_models import engine_of, greedy, prompts, run_all, small_limits, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from server_apps import save_tiny

from pagedserve.engine.graphs import DecodeGraphs, graph_sizes, make_graphs, size_for
from pagedserve.engine.llm import LLM
from pagedserve.engine.model.batch import SequenceChunk, make_batch
from pagedserve.engine.runner import ModelRunner

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@given(st.integers(1, 2000))
def test_sizes_reach_what_runs_and_waste_little(max_num_seqs: int) -> None:
    sizes = graph_sizes(max_num_seqs)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == min(max_num_seqs, 512)
    for rows in range(1, sizes[-1] + 1):
        size = size_for(rows, sizes)
        assert size is not None
        assert rows <= size < rows + 8
    assert size_for(sizes[-1] + 1, sizes) is None


def graphs_of(kind: str, num_blocks: int = 12) -> tuple[DecodeGraphs, torch.Tensor]:
    model = tiny_model(kind, "triton")
    kv = model.make_cache(num_blocks, 4)
    kv.data[:, :num_blocks] = torch.randn(
        kv.data[:, :num_blocks].shape, generator=torch.Generator().manual_seed(1)
    )
    graphs = DecodeGraphs(model, kv, (1, 2, 4, 8), 40, lambda run: run)
    assert list(graphs.record()) == [8, 4, 2, 1]
    return graphs, kv.data


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("count", [1, 3, 5, 8])
def test_padding_rows_write_nothing_and_change_nothing(kind: str, count: int) -> None:
    """After a larger batch, whose rows are in the buffers still."""
    graphs, data = graphs_of(kind)
    eight = [SequenceChunk([row + 5], 2 + row % 3, [row, row + 3]) for row in range(8)]
    graphs.logits(make_batch(eight, 4))
    before = data.clone()
    chunks = [SequenceChunk([row + 9], 5 - row % 4, [row, (row + 4) % 12]) for row in range(count)]
    batch = make_batch(chunks, 4)
    found = graphs.logits(batch)
    assert found is not None
    written = torch.zeros(before.shape[1], before.shape[4], dtype=torch.bool)
    written[batch.slot_mapping // 4, batch.slot_mapping % 4] = True
    changed = (data != before).any(dim=(0, 2, 3, 5))
    assert torch.equal(changed, written), "the rows' own slots, and no others: not the zero block's either"
    data.copy_(before)
    model, kv = graphs._model, graphs._kv
    expected = model.logits(model.forward(batch, kv))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_a_batch_that_is_too_large_has_no_graph() -> None:
    graphs, _ = graphs_of("llama")
    chunks = [SequenceChunk([row], 1, [row % 12]) for row in range(9)]
    assert graphs.logits(make_batch(chunks, 4)) is None


@pytest.mark.parametrize("depth", [0, 1])
def test_an_engine_on_graphs_says_the_same(depth: int) -> None:
    texts = prompts(6, 5, longest=12)
    with engine_of("mixed", model=tiny_model("llama", "reference")) as engine:
        expected = [made.token_ids for made in run_all(engine, texts, greedy(8))]
    used: list[int] = []
    limits = small_limits()
    with engine_of("mixed", limits, model=tiny_model("llama", "triton"), depth=depth) as engine:
        runner = engine.runner
        assert isinstance(runner, ModelRunner)

        def capture(run: object) -> object:
            def replay() -> torch.Tensor:
                used.append(1)
                return run()  # pyright: ignore[reportCallIssue]

            return replay

        graphs = DecodeGraphs(runner.model, runner.kv, (1, 2, 4, 8), limits.max_model_len, capture)  # pyright: ignore
        assert len(list(graphs.record())) == 4
        runner.graphs = graphs
        made = run_all(engine, texts, greedy(8))
    assert [completion.token_ids for completion in made] == expected
    assert used, "some steps had no chunk"


def test_where_there_are_no_graphs_that_is_said(tmp_path: Path) -> None:
    model = tiny_model("llama", "triton")
    assert make_graphs(model, model.make_cache(2, 4), 4, 32) is None, "a CPU"
    with pytest.raises(
        ValueError, match="enforce_eager is true, and there would be no CUDA graphs here anyway"
    ):
        LLM(save_tiny(tmp_path / "tiny"), enforce_eager=True, progress=False)
