"""Eight-bit floats (e4m3: sign, 4 bits of exponent with bias 7, 3 of mantissa; largest 448; NaN 0x7f) by bits.

Hardware conversion exists from sm_89 on; integer arithmetic gives the same bytes everywhere, also under
Triton's interpreter, and a cache of them is read at half the bandwidth of bfloat16 in any case.
Source of the format: Micikevicius et al. 2022 (arXiv 2209.05433); rounding is to nearest, ties to even, as torch's.
"""

import triton
import triton.language as tl

LARGEST = tl.constexpr(448.0)


@triton.jit
def e4m3_to_float(bits):
    """float32 of bytes, uint8 of any shape; NaN stays NaN."""
    wide = bits.to(tl.int32)
    magnitude = wide & 0x7F
    # As the upper bits of a float32 whose exponent is too small by 120; the product repairs it, subnormals too.
    normal = ((magnitude + 960) << 20).to(tl.float32, bitcast=True)
    subnormal = magnitude.to(tl.float32) * 0.001953125  # 2^-9
    value = tl.where(magnitude < 8, subnormal, normal)
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    # By its bit: some versions of Triton negate by taking from zero, which loses the sign of a zero.
    return (value.to(tl.int32, bitcast=True) | ((wide & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def float_to_e4m3(value):
    """Bytes, uint8, of float32 of any shape: nearest, ties to even; beyond 448 the largest; NaN is NaN."""
    bits = value.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(value), LARGEST)
    whole = magnitude.to(tl.int32, bitcast=True)
    normal = ((whole + 0x7FFFF + ((whole >> 20) & 1)) >> 20) - 960
    # 2^23 added and taken away rounds to a whole number of 2^-9.
    subnormal = (magnitude * 512.0 + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
    found = tl.where(magnitude < 0.015625, subnormal, normal)
    found = tl.where(value != value, 0x7F, found)
    return (sign | found).to(tl.uint8)
