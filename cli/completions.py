"""Completions as people and programs get them: printed as they grow, as JSON, and one line of statistics."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedserve.engine.outputs import Completion
    from pagedserve.engine.sampling.logprobs import PositionLogprobs, TokenLogprob
    from pagedserve.metrics.summary import Summary


class PrinterState:
    """Prints completions in their order as they grow: the first that has not ended comes live."""

    def __init__(self, labels: Sequence[str | None]) -> None:
        """``labels``: a line above each completion's text, or None for no such line."""
        self._labels = labels
        self._texts = [""] * len(labels)
        self._ended = [False] * len(labels)
        self._current = 0

    def begin(self) -> None:
        """Print the label of the completion that comes next, and what there is of its text."""
        if self._current < len(self._labels):
            label = self._labels[self._current]
            _write(("" if label is None else f"{label}\n") + self._texts[self._current])

    def add(self, index: int, text: str, has_ended: bool) -> None:
        """More text of a completion."""
        self._texts[index] += text
        self._ended[index] = has_ended
        if index != self._current:
            return
        _write(text)
        while self._current < len(self._labels) and self._ended[self._current]:
            _write("\n")
            self._current += 1
            self.begin()

    def break_off(self) -> None:
        """End the line that is being written, if one is."""
        if self._current < len(self._labels):
            _write("\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def prompts_as_json(
    texts: Sequence[str],
    ids: Sequence[Sequence[int]],
    completions: Sequence[Sequence[Completion]],
    decode: Callable[[list[int]], str],
) -> list[dict[str, Any]]:
    """Prompts with their completions as JSON values; ``decode`` turns ids into text, for logprobs."""
    return [
        {
            "prompt": text,
            "prompt_token_ids": list(own),
            "completions": [_completion(completion, decode) for completion in group],
        }
        for text, own, group in zip(texts, ids, completions, strict=True)
    ]


def _completion(completion: Completion, decode: Callable[[list[int]], str]) -> dict[str, Any]:
    logprobs, of_prompt = completion.logprobs, completion.prompt_logprobs
    return {
        "index": completion.index,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop": completion.stop,
        "error": completion.error,
        "num_cached_tokens": completion.num_cached_tokens,
        "logprobs": None if logprobs is None else [_position(position, decode) for position in logprobs],
        "prompt_logprobs": None
        if of_prompt is None
        else [position and _position(position, decode) for position in of_prompt],
    }


def _position(position: PositionLogprobs, decode: Callable[[list[int]], str]) -> dict[str, Any]:
    def token(one: TokenLogprob) -> dict[str, Any]:
        return {
            "token_id": one.token_id,
            "token": decode([one.token_id]),
            # JSON has no minus infinity.
            "logprob": one.logprob if math.isfinite(one.logprob) else None,
            "rank": one.rank,
        }

    return {**token(position.chosen), "top": [token(one) for one in position.top]}


def statistics(completions: Sequence[Completion], summary: Summary) -> str:
    """One line: how outputs ended, throughput, latency, memory, concurrency, and preemptions if there were any."""
    reasons = Counter(completion.finish_reason for completion in completions)
    ended = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
    shown = [
        f"{summary.num_output_tokens} tokens ({ended})",
        f"{_number(summary.output_tokens_per_s)} output tokens/s",
        f"TTFT p50 {_number(summary.ttft_p50_s * 1e3)} ms",
        f"ITL p50 {_number(summary.itl_p50_s * 1e3)} ms",
        f"KV occupancy {_number(summary.kv_occupancy_mean * 100)}%",
        f"KV waste {_number(summary.waste_mean * 100)}%",
        f"peak running {summary.num_running_peak}",
        *_preemptions(summary),
    ]
    return ", ".join(shown)


def _preemptions(summary: Summary) -> list[str]:
    if not summary.num_preemptions:
        return []
    swapped = summary.num_blocks_swapped_out
    return [
        f"preemptions {summary.num_preemptions:.0f}",
        f"recomputed tokens {summary.num_recomputed_tokens:.0f}",
        *([f"KV blocks swapped out {swapped:.0f}"] if swapped else []),
    ]


def _number(value: float) -> str:
    """Three significant digits; an en dash where there was nothing to measure."""
    if math.isnan(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
