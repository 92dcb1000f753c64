"""Two ranks in two processes: scales of an eight-bit KV cache are measured together, and are those of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from server_apps import save_tiny

from pagedserve.engine.llm import LLM
from pagedserve.engine.params import SamplingParams
from pagedserve.kernels.launching import is_interpreted

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(not is_interpreted(), reason="gloo between two ranks on the CPU"),
]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "attention": "triton",
    "kv_cache_dtype": "fp8",
    "calculate_kv_scales": True,
    "num_blocks": 8,
    "max_model_len": 64,
    "progress": False,
}


def test_two_ranks_have_the_scales_and_the_output_of_one(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny")
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    llm = LLM(folder, **OPTIONS)
    scales, heads = llm.model.kv_scales.by_layer, llm.model.local.num_kv_heads
    expected = llm.generate(["The moon", "x"], params)
    llm.close()
    llm = LLM(folder, **OPTIONS, tensor_parallel_size=2)
    try:
        assert llm.model.local.num_kv_heads == heads // 2
        torch.testing.assert_close(torch.tensor(llm.model.kv_scales.by_layer), torch.tensor(scales))
        found = llm.generate(["The moon", "x"], params)
    finally:
        llm.close()
    assert [one[0].token_ids for one in found] == [one[0].token_ids for one in expected]
