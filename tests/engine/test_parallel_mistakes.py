"""Mistakes that show when all ranks have loaded: nothing of them is left in the way of the next try."""

from pathlib import Path

import pytest
import torch.distributed as dist
from server_apps import save_tiny

from pagedserve.engine.kv_memory import PoolTooLarge
from pagedserve.engine.llm import LLM


def test_a_pool_too_large_for_all_ranks_leaves_none_behind(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny")
    with pytest.raises(PoolTooLarge, match="num_blocks 1000000000"):
        LLM(model, tensor_parallel_size=2, num_blocks=10**9, progress=False)
    assert not dist.is_initialized()
    llm = LLM(model, tensor_parallel_size=2, num_blocks=20, max_model_len=64, progress=False)
    llm.close()
