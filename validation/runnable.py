"""Whether a trace can run within limits at all. Free of the simulator, so that a replay needs the engine only."""

from __future__ import annotations

from pagedserve.policy import Limits, RequestRefused
from pagedserve.traces.requests import to_requests
from pagedserve.traces.trace import Trace


def check_runnable(trace: Trace, limits: Limits, max_tokens: int | None = None) -> None:
    """Raise ValueError if a request of the trace can never run, or never reach its true length."""
    if max_tokens is None:
        max_tokens = int(trace.num_output_tokens.max(initial=1))
    for request, length in zip(
        to_requests(trace, None, max_tokens), trace.num_output_tokens.tolist(), strict=True
    ):
        advice = "shorten the trace's lengths, or raise the limit"
        try:
            allowed = limits.output_limit(request)
        except RequestRefused as error:
            raise ValueError(f"{error} ({advice})") from error
        if allowed < min(length, max_tokens):
            raise ValueError(
                f"request {request.id} of the trace has {request.num_prompt_tokens} prompt and {length} output "
                f"tokens, and max_model_len {limits.max_model_len} and {limits.num_blocks} KV blocks let it "
                f"have {allowed}: {advice}"
            )
