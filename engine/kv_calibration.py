"""The made-up prompts by which scales of an eight-bit KV cache are measured, before anything is served.

One is text of several kinds behind whatever the tokenizer begins a text with (models keep their largest keys and
values there), the other goes through the vocabulary in large steps. Both are the same at every start, so that a
model has the same scales every time and on every rank. Nobody's requests are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pagedserve.engine.model.kv_scales import calculate_scales
from pagedserve.engine.model.model import Model
from pagedserve.engine.parallel.ranks import Calibrate

MOST_TOKENS = 512
STRIDE = 7919
TEXT = """The river had risen in the night, and by morning the lower meadow was a lake. "We shall have to take the
boat," said Anna, "or wait until Thursday." Nobody wanted to wait. They loaded bread, two lamps and the letters, and
pushed off at half past nine; at the mill they met the doctor, who had been rowing since dawn and was in no mood to
talk.

## Results, third quarter of 2023

| region | units | revenue (EUR) | change |
|---|--:|--:|--:|
| north | 12,408 | 1,093,220.50 | +4.1 % |
| south | 9,977 | 880,114.00 | -0.8 % |

def mean(values: list[float]) -> float:
    if not values:
        raise ValueError("mean of nothing")
    return sum(values) / len(values)

{"id": 4711, "tags": ["a", "b"], "nested": {"ok": true, "ratio": 0.125}, "url": "https://example.org/?q=1&r=2"}

User: Why is the sky blue?
Assistant: Because air scatters short waves of light more than long ones: the scattering goes with the fourth power of
the frequency. Le ciel est bleu; der Himmel ist blau; el cielo es azul.
"""


def calibration_prompts(
    encode: Callable[[str], Sequence[int]], vocab_size: int, max_model_len: int
) -> tuple[tuple[int, ...], ...]:
    """Token ids of both, each of at most `MOST_TOKENS` and ``max_model_len``."""
    most = min(MOST_TOKENS, max_model_len)
    text = tuple(token for token in encode(TEXT) if 0 <= token < vocab_size)[:most]
    strides = tuple(index * STRIDE % vocab_size for index in range(most))
    return (text, strides) if text else (strides,)


def check_asked(is_byte_cache: bool) -> None:
    """ValueError if scales are to be measured for a cache that has none."""
    if not is_byte_cache:
        raise ValueError(
            "calculate_kv_scales is true beside kv_cache_dtype auto, a cache that has no scales: leave it out, or "
            "choose kv_cache_dtype fp8"
        )


def calibrate(
    model: Model, encode: Callable[[str], Sequence[int]], vocab_size: int, max_model_len: int
) -> None:
    """Measure the scales that the checkpoint lacks, on every rank. ValueError if it lacks none."""
    check_asked(model.has_byte_cache)
    if not model.kv_scales.num_missing:
        raise ValueError(
            "calculate_kv_scales is true, and the checkpoint has all scales of the KV cache: leave it out"
        )
    prompts = calibration_prompts(encode, vocab_size, max_model_len)
    model.ranks.send(Calibrate(prompts))
    calculate_scales(model, prompts)
