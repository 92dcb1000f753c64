"""How many KV blocks there are, as plain sums; and the step that is measured, on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_models import small_limits, tiny_model
from server_apps import save_tiny

from pagedserve.engine.kv_memory import GIB, DeviceMemory, sample_all
from pagedserve.engine.largest_step import largest_step
from pagedserve.engine.llm import LLM

H200 = DeviceMemory(total=140 * GIB, in_use=16 * GIB, step_peak=2 * GIB)


def test_blocks_are_what_is_left_of_the_share() -> None:
    """0.9 of 140 GiB less 18 GiB are 108; one block more is kept that is always zero."""
    assert H200.num_blocks(0.9, GIB // 8, needed=1) == 108 * 8 - 1
    assert H200.num_blocks(0.5, 2 << 20, needed=1) == 52 * 512 - 1
    assert str(H200) == "140.0 GiB of memory, 16.0 in use before, 2.0 for a step"


@pytest.mark.parametrize(("share", "needed", "left"), [(0.9, 900, 863), (0.13, 1, 0), (0.01, 1, 0)])
def test_too_little_for_one_sequence_is_refused_with_the_numbers(
    share: float, needed: int, left: int
) -> None:
    words = (
        rf"{share:g} of 140.00 GiB, less 16.00 in use and 2.00 for a step, leaves room for {left} KV blocks"
    )
    with pytest.raises(ValueError, match=f"{words}; one sequence .* takes {needed}: lower max_model_len"):
        H200.num_blocks(share, GIB // 8, needed)


@pytest.mark.parametrize("budget", [10, 96, 100, 250])
def test_the_largest_step_fills_the_budget(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole prompts of the longest length and a rest; then logits for every seat, and a sample of each."""
    model, limits = tiny_model(), small_limits(max_num_batched_tokens=budget)
    seen: list[int] = []
    forward = type(model).forward

    def spy(self: object, batch: object, kv: object) -> torch.Tensor:
        seen.append(batch.num_tokens)  # pyright: ignore[reportAttributeAccessIssue]
        return forward(self, batch, kv)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(type(model), "forward", spy)
    logits = largest_step(model, limits)
    assert seen == [budget]
    assert logits.shape == (limits.max_num_seqs, model.config.vocab_size)
    assert torch.isfinite(logits).all()
    sample_all(model, limits, logits)


def test_the_share_is_for_gpus_and_against_a_number(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny")
    with pytest.raises(ValueError, match=r"gpu_memory_utilization is 0\.5 beside device cpu"):
        LLM(folder, gpu_memory_utilization=0.5, progress=False)
    with pytest.raises(ValueError, match="beside num_blocks, which says the number"):
        LLM(folder, gpu_memory_utilization=0.5, num_blocks=8, progress=False)
