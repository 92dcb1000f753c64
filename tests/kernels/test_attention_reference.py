import pytest
import torch
from paged_cases import dense_attention, make_case, random_case, random_stream

from pagedserve.kernels.attention import AttentionSpec, make_attention

SPEC = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=16)


@pytest.mark.parametrize("window", [None, 1, 7, 100])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_equals_textbook_attention(block_size: int, window: int | None) -> None:
    spec = AttentionSpec(6, 2, 16, window)
    generator = torch.Generator().manual_seed(1)
    streams = [random_stream(n, spec, torch.float32, generator) for n in (37, 1, 20)]
    case = make_case([(stream, 0, len(stream.query)) for stream in streams], spec, block_size, generator)
    expected = torch.cat([dense_attention(stream, spec) for stream in streams])
    torch.testing.assert_close(case.run("reference").double(), expected, atol=2e-6, rtol=0)


def test_bits_do_not_depend_on_chunks_neighbours_or_blocks() -> None:
    generator = torch.Generator().manual_seed(2)
    stream = random_stream(40, SPEC, torch.float32, generator)
    whole = make_case([(stream, 0, 40)], SPEC, 4, generator).run("reference")
    rows = []
    for start, stop in [(0, 1), (1, 8), (8, 23), (23, 40)]:
        other = random_stream(29, SPEC, torch.float32, generator)
        case = make_case([(other, 20, 29), (stream, start, stop)], SPEC, 16, generator)
        rows.append(case.run("reference")[9:])
    assert torch.equal(torch.cat(rows), whole)


def test_bfloat16_is_computed_in_float32_and_rounded_once() -> None:
    case = random_case([(30, 3), (0, 5)], SPEC, 4, torch.bfloat16)
    out = case.run("reference")
    case.cache.data = case.cache.data.float()
    wide = type(case)(case.cache, case.batch, case.query.float(), SPEC).run("reference")
    assert torch.equal(out, wide.to(torch.bfloat16))


def test_a_foreign_block_in_the_table_changes_the_result() -> None:
    """The checks above can fail: attention over one wrong block is noticed."""
    case = random_case([(30, 3), (30, 3)], SPEC, 4)
    before = case.run("reference")
    case.batch.block_tables[0, 0] = case.batch.block_tables[1, 0]
    assert (case.run("reference") - before).abs().max() > 1e-3


def test_names() -> None:
    assert make_attention("auto", SPEC).name == "cpu"
    assert make_attention("auto", SPEC, "meta").name == "reference"
    with pytest.raises(ValueError, match=r"unknown attention backend 'flash'.*reference, cpu"):
        make_attention("flash", SPEC)
    with pytest.raises(ValueError, match="'cpu' cannot run on device 'meta'"):
        make_attention("cpu", SPEC, "meta")
