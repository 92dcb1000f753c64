"""Published attention times on an H200, to stand beside ours; facts, not measured here.

Source: the Python package aiconfigurator-core (Apache-2.0), tables of h200_sxm for vLLM 0.24, FlashAttention-3:
`generation_attention_perf` and `context_attention_perf` (step 0). bfloat16, 32 query heads, 8 KV heads, head size
128 (Llama-3.1-8B), one layer, milliseconds. All sequences of a batch are equally long.
"""

PAST = (127, 511, 1023, 2047, 4095, 8191, 16383)
"""Tokens in the cache before the decode."""
_DECODE_MS: dict[int, tuple[float, ...]] = {
    1: (0.0117, 0.0132, 0.0136, 0.0152, 0.0166, 0.0189, 0.0335),
    8: (0.0125, 0.0156, 0.0174, 0.0326, 0.0494, 0.0833, 0.1512),
    32: (0.0170, 0.0326, 0.0468, 0.0772, 0.1355, 0.2694, 0.4940),
    64: (0.0255, 0.0516, 0.0807, 0.1399, 0.2709, 0.4908),
    128: (0.0466, 0.0959, 0.1486, 0.2739, 0.4926),
    256: (0.0803, 0.1771, 0.2725),
}
_PREFILL_MS = {512: 0.022, 1024: 0.035, 2048: 0.087, 4096: 0.268, 8192: 0.938, 16384: 3.37}


def decode_us(batch: int, past: int) -> float | None:
    """The published time of a decode batch in microseconds; None where there is none."""
    times = dict(zip(PAST, _DECODE_MS.get(batch, ()), strict=False))
    return None if past not in times else 1e3 * times[past]


def prefill_us(num_tokens: int) -> float | None:
    """The published time of one whole prompt in microseconds; None where there is none."""
    found = _PREFILL_MS.get(num_tokens)
    return None if found is None else 1e3 * found
