import pytest
import torch

from pagedserve.kernels.kv_cache import KVCache


def test_a_token_is_found_where_its_slot_says() -> None:
    cache = KVCache(2, 5, 4, 3, 8, torch.float32)
    tokens = torch.randn(3, 6, 8)
    slots = torch.tensor([2 * 4 + 1, 0, 4 * 4 + 3])
    cache.write(1, tokens, cache.rows(slots))
    for token, (block, offset) in enumerate([(2, 1), (0, 0), (4, 3)]):
        assert torch.equal(cache.layer(1)[block, 0, :, offset], tokens[token, :3])
        assert torch.equal(cache.layer(1)[block, 1, :, offset], tokens[token, 3:])
    assert cache.layer(1).count_nonzero() == tokens.numel()
    assert cache.layer(0).count_nonzero() == 0


def test_slots_may_come_as_int32_and_rows_are_64_bit() -> None:
    cache = KVCache(1, 1 << 26, 16, 8, 128, torch.bfloat16, device="meta")
    slot = (1 << 26) * 16 - 1
    for dtype in (torch.int32, torch.int64):
        rows = cache.rows(torch.tensor([slot], dtype=dtype))
        assert rows.dtype == torch.int64
        assert rows[0].tolist() == [(slot // 16) * 256 + 16 * head + 15 for head in range(16)]


def test_the_zero_block_is_beyond_those_handed_out_and_stays_zero() -> None:
    cache = KVCache(1, 3, 2, 1, 4, torch.float32)
    cache.write(0, torch.ones(6, 2, 4), cache.rows(torch.arange(6)))
    assert cache.zero_block == 3
    assert cache.layer(0)[cache.zero_block].count_nonzero() == 0
    assert cache.layer(0)[:3].count_nonzero() == 48


def test_a_slot_beyond_the_cache_is_an_error_and_not_a_stray_write() -> None:
    cache = KVCache(2, 3, 2, 1, 4, torch.float32)
    with pytest.raises(IndexError, match="out of bounds"):
        cache.write(0, torch.ones(1, 2, 4), cache.rows(torch.tensor([8])))
    assert cache.data.count_nonzero() == 0


def test_bytes_and_sizes() -> None:
    assert KVCache(2, 3, 4, 5, 8, torch.bfloat16).num_bytes == 2 * (3 + 1) * 2 * 5 * 4 * 8 * 2
    with pytest.raises(ValueError, match="num_blocks is 0, it must be at least 1"):
        KVCache(1, 0, 4, 1, 8, torch.float32)
