"""What a layer does between its matrix products, and sampling: every kernel against its twin, then timed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from gpu_cases import KernelCase, run_cases
from gpu_part import Part
from gpu_timing import nan_filled, relative_error
from torch.nn import functional

from pagedserve.engine.params import SamplingParams
from pagedserve.engine.sampling import draws
from pagedserve.engine.sampling import philox as philox_twin
from pagedserve.engine.sampling.kernel_choice import choose_by_kernels
from pagedserve.engine.sampling.rows import SamplingBatch, SamplingRows
from pagedserve.engine.sampling.sampler import choose_in_torch
from pagedserve.kernels import greedy, philox, rms_norm, rope_kv, silu_multiply
from pagedserve.kernels.kv_cache import KVCache

BLOCK_SIZE = 16
EPS = 1e-5
FILTERS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50, top_p 0.95": {"top_k": 50, "top_p": 0.95},
    "min_p 0.05": {"min_p": 0.05},
}
Make = Callable[[], KernelCase]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one model; ``tokens``: rows of a decode and of a prefill step; ``sampled``: rows that are sampled."""

    model: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    has_head_norm: bool
    tokens: tuple[int, ...] = (64, 8192)
    sampled: int = 256


FULL = (
    Sizes("llama-3.1-8b", 4096, 14336, 32, 8, 128, 128256, False),
    Sizes("qwen3-0.6b", 1024, 3072, 16, 8, 128, 151936, True),
)
TINY = (Sizes("tiny", 48, 80, 4, 2, 16, 5000, True, (5,), 2),)


def run(part: Part) -> None:
    """All kernels but attention."""
    run_cases(part, list(cases(part)), "kernels")


def cases(part: Part) -> Iterator[Make]:
    """Every kernel at every model's sizes."""
    for sizes in TINY if part.is_tiny else FULL:
        for tokens in sizes.tokens:
            for make in (_norm, _add_norm, _silu, _rope):
                yield _named(make, sizes, tokens, part.device)
        yield _named(_rope_bytes, sizes, sizes.tokens[-1], part.device)
        yield _named(_greedy, sizes, sizes.sampled, part.device)
        for name in FILTERS:
            yield _named(partial(_filtered, name), sizes, sizes.sampled, part.device)
    yield _named(_noise, (TINY if part.is_tiny else FULL)[0], 256, part.device)


def _named(make: Callable[[Sizes, int, str], KernelCase], sizes: Sizes, rows: int, device: str) -> Make:
    case = partial(make, sizes, rows, device)
    name = getattr(make, "__name__", "sampling").strip("_")
    case.__name__ = f"{name}, {sizes.model}, {rows} rows"  # pyright: ignore[reportAttributeAccessIssue]
    return case


def _random(device: str, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device).to(torch.bfloat16)


def _against(kernel: Callable[[], torch.Tensor], twin: Callable[[], torch.Tensor]) -> float:
    with nan_filled():
        found = kernel()
    return relative_error(found, twin())


def _norm(sizes: Sizes, tokens: int, device: str) -> KernelCase:
    rows, weight = _random(device, tokens, sizes.hidden), _random(device, sizes.hidden)
    kernel = partial(rms_norm.rms_norm, rows, weight, EPS)
    peer = partial(functional.rms_norm, rows, (sizes.hidden,), weight, EPS)
    check = partial(_against, kernel, partial(rms_norm.rms_norm_twin, rows, weight, EPS))
    text = f"{tokens} x {sizes.hidden}"
    return KernelCase("norm", sizes.model, text, check, kernel, 4 * rows.numel(), peers={"torch": peer})


def _add_norm(sizes: Sizes, tokens: int, device: str) -> KernelCase:
    rows, delta = (_random(device, tokens, sizes.hidden) for _ in range(2))
    weight = _random(device, sizes.hidden)

    def check() -> float:
        ours, theirs = rows.clone(), rows.clone()
        error = _against(
            lambda: rms_norm.add_rms_norm(ours, delta, weight, EPS),
            lambda: rms_norm.add_rms_norm_twin(theirs, delta, weight, EPS),
        )
        return max(error, relative_error(ours, theirs))

    # Added to what is there again and again while it is timed: small, so that it stays finite.
    small = delta * 1e-3
    kernel = partial(rms_norm.add_rms_norm, rows, small, weight, EPS)
    text = f"{tokens} x {sizes.hidden}"
    return KernelCase("add and norm", sizes.model, text, check, kernel, 8 * rows.numel())


def _silu(sizes: Sizes, tokens: int, device: str) -> KernelCase:
    both = _random(device, tokens, 2 * sizes.inner)
    kernel = partial(silu_multiply.silu_multiply, both)

    def peer() -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    check = partial(_against, kernel, partial(silu_multiply.silu_multiply_twin, both))
    text = f"{tokens} x {sizes.inner}"
    return KernelCase(
        "silu times up", sizes.model, text, check, kernel, 3 * both.numel(), peers={"torch": peer}
    )


def _rope(sizes: Sizes, tokens: int, device: str, is_bytes: bool = False) -> KernelCase:
    projected = _random(device, tokens, sizes.heads + 2 * sizes.kv_heads, sizes.head_dim)
    positions = torch.randint(0, 4096, (tokens,), device=device)
    angles = torch.rand(4096, sizes.head_dim // 2, device=device) * 6.28
    tables = angles.cos(), angles.sin()
    num_blocks = -(-tokens // BLOCK_SIZE) + 3
    slots = torch.randperm(num_blocks * BLOCK_SIZE, device=device)[:tokens]
    slots[:: max(2, tokens // 3)] = -1
    norms = None
    if sizes.has_head_norm:
        norms = _random(device, sizes.head_dim), _random(device, sizes.head_dim)
    dtype, scales = (torch.uint8, (0.02, 0.02)) if is_bytes else (torch.bfloat16, (1.0, 1.0))
    cache = KVCache(1, num_blocks, BLOCK_SIZE, sizes.kv_heads, sizes.head_dim, dtype, device)
    given = (projected, positions, tables, slots)

    def check() -> float:
        ours, theirs = torch.zeros_like(cache.layer(0)), torch.zeros_like(cache.layer(0))
        error = _against(
            lambda: rope_kv.rotate_and_write(*given, ours, norms, EPS, scales),
            lambda: rope_kv.rotate_and_write_twin(*given, theirs, norms, EPS, scales),
        )
        if is_bytes:
            ours, theirs = (each.view(torch.float8_e4m3fn).float() for each in (ours, theirs))
        return max(error, relative_error(ours, theirs))

    run = partial(rope_kv.rotate_and_write, *given, cache.layer(0), norms, EPS, scales)
    written = tokens * 2 * sizes.kv_heads * sizes.head_dim * dtype.itemsize
    num_bytes = 2 * projected.numel() + 2 * tokens * sizes.heads * sizes.head_dim + written
    text = f"{tokens} x {projected.shape[1]} heads"
    return KernelCase("rotate and write" + ", fp8" * is_bytes, sizes.model, text, check, run, num_bytes)


def _rope_bytes(sizes: Sizes, tokens: int, device: str) -> KernelCase:
    return _rope(sizes, tokens, device, is_bytes=True)


def _greedy(sizes: Sizes, rows: int, device: str) -> KernelCase:
    logits = torch.randn(rows, sizes.vocab, device=device).bfloat16().float()  # full of ties

    def check() -> float:
        with nan_filled():
            tokens, peaks = greedy.greedy_tokens(logits)
        expected, right = greedy.greedy_tokens_twin(logits)
        return float((tokens != expected).sum() + (peaks != right).sum())

    run, peer = partial(greedy.greedy_tokens, logits), partial(logits.argmax, dim=-1)
    text = f"{rows} x {sizes.vocab}"
    return KernelCase(
        "greedy", sizes.model, text, check, run, 4 * logits.numel(), bound=0.0, peers={"torch": peer}
    )


def _filtered(name: str, sizes: Sizes, rows: int, device: str) -> KernelCase:
    """Sampling with one filter; logits become weights in place, so each time a copy is made first, and counted."""
    table = SamplingRows(sizes.vocab, device)
    for row in range(rows):
        table.add(row, SamplingParams(**FILTERS[name]), seed=row, prompt_ids=[0])
    batch = table.select(tuple(range(rows)), [7] * rows)
    logits = torch.randn(rows, sizes.vocab, device=device) * 3
    left = logits.clone()

    def run() -> object:
        left.copy_(logits)
        return choose_by_kernels(left, batch)

    num_bytes = 4 * logits.numel()
    text = f"{rows} x {sizes.vocab}, copied first"
    check = partial(_sampling_errors, logits, batch)
    return KernelCase(
        f"sampling, {name}",
        sizes.model,
        text,
        check,
        run,
        5 * num_bytes,
        bound=0.0,
        peers=_in_torch(logits, batch),
    )


def _in_torch(logits: torch.Tensor, batch: SamplingBatch) -> dict[str, Callable[[], object]]:
    return {"torch": lambda: choose_in_torch(logits.clone(), batch)}


def _sampling_errors(logits: torch.Tensor, batch: SamplingBatch) -> float:
    """Rows whose token is not that of the sampler's torch code on the very weights that the kernels used."""
    left = logits.clone()
    with nan_filled():
        tokens, peaks = choose_by_kernels(left, batch)
    with mock.patch.object(draws, "fixed_point_weights", lambda weights, *_: weights.to(torch.int64)):
        expected, _ = choose_in_torch(left.clone(), batch)
    return float((tokens != expected).sum() + (peaks != logits.amax(-1)).sum())


def _noise(sizes: Sizes, rows: int, device: str) -> KernelCase:
    draw = random.Random(0)
    numbers = [[draw.randrange(-(1 << 63), 1 << 63) for _ in range(rows)], list(range(rows)), [0] * rows]
    given = [torch.tensor(each, device=device) for each in numbers]

    def check() -> float:
        with nan_filled():
            found = philox.noise_words(*given)
        return float((found.cpu() != philox_twin.noise_words(*(each.cpu() for each in given))).sum())

    run = partial(philox.noise_words, *given)
    return KernelCase("noise", "any", f"{rows} words", check, run, 32 * rows, bound=0.0)
