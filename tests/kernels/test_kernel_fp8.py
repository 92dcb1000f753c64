"""Eight-bit floats by integer arithmetic: every byte, and every kind of float32, against torch's own type."""

# Triton annotates its functions with classes of its own, not with what its language computes with.
# pyright: reportArgumentType=false

import math

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_device import DEVICE

from pagedserve.kernels.fp8 import e4m3_to_float, float_to_e4m3

BLOCK = 1024


@triton.jit
def _decode(out_ptr, bytes_ptr, count, BLOCK: tl.constexpr):  # noqa: N803
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    tl.store(out_ptr + place, e4m3_to_float(tl.load(bytes_ptr + place, mask=inside, other=0)), mask=inside)


@triton.jit
def _encode(out_ptr, values_ptr, count, BLOCK: tl.constexpr):  # noqa: N803
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    tl.store(out_ptr + place, float_to_e4m3(tl.load(values_ptr + place, mask=inside, other=0.0)), mask=inside)


def decode(codes: torch.Tensor) -> torch.Tensor:
    out = torch.full(codes.shape, float("nan"), device=DEVICE)
    _decode[(triton.cdiv(len(codes), BLOCK),)](out, codes.to(DEVICE), len(codes), BLOCK=BLOCK)
    return out.cpu()


def encode(values: torch.Tensor) -> torch.Tensor:
    out = torch.full(values.shape, 0x55, dtype=torch.uint8, device=DEVICE)
    _encode[(triton.cdiv(len(values), BLOCK),)](out, values.to(DEVICE), len(values), BLOCK=BLOCK)
    return out.cpu()


def by_torch(values: torch.Tensor) -> torch.Tensor:
    """Torch's bytes; it makes NaN of what is too large, where we saturate."""
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def is_nan(codes: torch.Tensor) -> torch.Tensor:
    return (codes & 0x7F) == 0x7F


def check(values: torch.Tensor) -> None:
    ours, theirs = encode(values), by_torch(values)
    assert torch.equal(is_nan(ours), values.isnan())
    real = ~values.isnan()
    wrong = (ours != theirs) & real
    assert not wrong.any(), f"{values[wrong][:5].tolist()}: {ours[wrong][:5]}, not {theirs[wrong][:5]}"


def test_every_byte_is_decoded_as_torch_decodes_it() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).float()
    found = decode(codes)
    assert torch.equal(found.isnan(), expected.isnan())
    assert expected.isnan().sum() == 2
    same = found.view(torch.int32) == expected.view(torch.int32)  # the sign of zero too
    assert (same | expected.isnan()).all()


def test_every_byte_comes_back() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    real = codes[~is_nan(codes)]
    assert torch.equal(encode(decode(real)), real)


def test_every_tie_and_its_neighbours() -> None:
    """Halfway between two neighbours, and the floats just beside: nearest, ties to even."""
    grid = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (grid[1:] + grid[:-1]) / 2
    up, down = torch.tensor(math.inf), torch.tensor(-math.inf)
    values = torch.cat([grid, middle, middle.nextafter(up), middle.nextafter(down)])
    check(torch.cat([values, -values]))


def test_the_ends() -> None:
    """Zeros, subnormals of both formats, what is too large, infinities and NaN."""
    tiny = [0.0, 1e-45, 1e-38, 2.0**-126, 2.0**-11, 2.0**-10, 2.0**-10 * 1.0001, 2.0**-9, 2.0**-6]
    large = [447.9, 448.0, 448.1, 463.9, 464.0, 465.0, 479.0, 480.0, 512.0, 1e30, 3.4e38, math.inf]
    values = torch.tensor(tiny + large + [math.nan])
    check(torch.cat([values, -values]))
    assert encode(torch.tensor([500.0, -math.inf])).tolist() == [0x7E, 0xFE]
    assert encode(torch.tensor([0.0, -0.0])).tolist() == [0, 0x80]


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # NaN among them
def test_many_floats_of_all_sizes() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (100_000,), generator=generator).to(torch.int32)
    check(bits.view(torch.float32))
    check(torch.randn(100_000, generator=generator) * torch.logspace(-4, 3, 100_000))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_any_floats(values: list[float]) -> None:
    check(torch.tensor(values, dtype=torch.float32))
