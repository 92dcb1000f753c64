"""Blocks to host memory and back: every byte where it belongs, in any order, however little is staged."""

import random
from collections.abc import Sequence

import pytest
import torch

from pagedserve.kernels import host_cache
from pagedserve.kernels.host_cache import HostCache, HostMemoryTooSmall, block_shape, runs_of
from pagedserve.kernels.kv_cache import KVCache

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)


def filled(dtype: torch.dtype, num_blocks: int = 12) -> KVCache:
    """Three layers whose every number is another, as far as the dtype has so many."""
    kv = KVCache(3, num_blocks, 4, 2, 8, dtype)
    numbers = torch.randint(0, 250, kv.data[:, :num_blocks].shape, generator=torch.Generator().manual_seed(1))
    kv.data[:, :num_blocks] = numbers.to(dtype)
    return kv


def stage(kv: KVCache, num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let so many blocks be staged at a time."""
    block_bytes = torch.Size(block_shape(kv)).numel() * kv.data.element_size()
    monkeypatch.setattr(host_cache, "STAGE_BYTES", num_blocks * block_bytes)


@pytest.mark.parametrize("staged", [1, 2, 5, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_go_out_and_come_back_elsewhere(
    dtype: torch.dtype, staged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = filled(dtype)
    stage(kv, staged, monkeypatch)
    host, before = HostCache(kv, 9), kv.data.clone()
    out, held, back = [7, 0, 3, 11, 4], [2, 3, 8, 0, 1], [5, 11, 0, 2, 9]
    host.copy_out(kv, out, held)
    assert torch.equal(kv.data, before), "copying out changes nothing in the cache"
    for block, place in zip(out, held, strict=True):
        assert torch.equal(host.data[place], before[:, block])
    host.copy_in(kv, back, held)
    for block in range(kv.num_blocks + 1):
        source = dict(zip(back, out, strict=True)).get(block, block)
        assert torch.equal(kv.data[:, block], before[:, source]), f"block {block}"


@pytest.mark.parametrize("staged", [1, 3])
def test_many_copies_in_a_row_keep_every_sequence_apart(staged: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mirror made of Python lists, with the host blocks as scattered as they get."""
    rng, kv = random.Random(5), filled(torch.float32, 16)
    stage(kv, staged, monkeypatch)
    host = HostCache(kv, 10)
    device = [kv.data[:, block].clone() for block in range(16)]
    away = [torch.zeros_like(device[0]) for _ in range(10)]
    for _ in range(40):
        count = rng.randint(0, 6)
        blocks, places = rng.sample(range(16), count), rng.sample(range(10), count)
        if rng.random() < 0.5:
            host.copy_out(kv, blocks, places)
            for block, place in zip(blocks, places, strict=True):
                away[place] = device[block].clone()
        else:
            host.copy_in(kv, blocks, places)
            for block, place in zip(blocks, places, strict=True):
                device[block] = away[place].clone()
        assert torch.equal(kv.data[:, :16], torch.stack(device, 1))
        assert torch.equal(host.data, torch.stack(away))
    assert not kv.data[:, kv.zero_block].any()


@pytest.mark.parametrize(
    ("numbers", "runs"),
    [
        ((), []),
        ((4,), [(0, 4, 1)]),
        ((4, 5, 6), [(0, 4, 3)]),
        ((6, 5, 4), [(0, 6, 1), (1, 5, 1), (2, 4, 1)]),
        ((1, 2, 9, 10, 3), [(0, 1, 2), (2, 9, 2), (4, 3, 1)]),
    ],
)
def test_runs_are_as_long_as_can_be(numbers: Sequence[int], runs: list[tuple[int, int, int]]) -> None:
    assert runs_of(numbers) == runs


def test_a_size_below_1_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks is 0, it must be at least 1"):
        HostCache(filled(torch.float32), 0)


def test_memory_that_cannot_be_had_is_told_in_gib() -> None:
    with pytest.raises(
        HostMemoryTooSmall, match=r"num_cpu_blocks 1000000000000: [\d,]+\.\d\d GiB of host memory"
    ):
        HostCache(filled(torch.float32), 10**12)
