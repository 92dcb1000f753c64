"""When every token came, and what each request's times were.

Definitions are those of the vLLM benchmark client (``vllm bench serve``), taken at token level from the
run's own clock instead of per chunk received (a client's record has no other: there tokens that came in
one chunk have one time): TTFT = first token - arrival; ITL = gap between consecutive tokens of one request;
TPOT = (last - first token) / (tokens - 1); end to end = last token - arrival.
Queue time = first scheduled - arrival, as vLLM's server reports it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagedserve.metrics.record import RecordError, RunRecord

NS_PER_S = 1e9
FINISHED = ("stop", "length")  # the reasons by which a request got all that it asked for


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """Every emitted token, sorted by (request, time).

    ``request`` is the row in ``record.requests``; tokens of row r are ``offsets[r]:offsets[r + 1]``.
    All int64; ``offsets`` has one entry more than there are requests.
    """

    request: np.ndarray
    time_ns: np.ndarray
    offsets: np.ndarray

    @property
    def counts(self) -> np.ndarray:
        """Tokens emitted, per request row."""
        return np.diff(self.offsets)


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Per request row, float seconds; NaN where the quantity does not exist for that request.

    ``ttft_s``: it emitted a token. ``itl_max_s``, its longest gap: it emitted two. ``tpot_s``: it finished
    with two. ``e2e_s``: it finished with one. ``queue_time_s``: it was scheduled. ``finished`` (bool) means
    for a reason in ``FINISHED``: a request cut short has a TTFT and gaps, but no true length and no end.
    """

    finished: np.ndarray
    ttft_s: np.ndarray
    itl_max_s: np.ndarray
    tpot_s: np.ndarray
    e2e_s: np.ndarray
    queue_time_s: np.ndarray


def token_times(record: RunRecord) -> TokenTimes:
    """Expand the record's emissions into token times.

    Raises ``RecordError`` when an emission names an unknown request or step, needs more decoding steps than
    the run has, or when a request's tokens are not as many as its ``num_output_tokens``.
    """
    row, first, count, decode_commit, next_decode = _runs(record)
    # Token j >= 1 of a run comes with decoding step next_decode + j - 1; token 0 with first_step itself.
    starts = np.cumsum(count) - count
    index = np.arange(count.sum()) + np.repeat(next_decode - 1 - starts, count)
    index[starts] = 0
    commit = record.array("steps", "commit_ns")
    time = decode_commit[index] if decode_commit.size else np.zeros(index.size, np.int64)
    time[starts] = commit[first]
    request = np.repeat(row, count)
    if np.any((np.diff(time) < 0) & (request[1:] == request[:-1])):  # runs of one request that overlap
        order = np.lexsort((time, request))
        time = time[order]
    num_tokens = np.bincount(request, minlength=record.requests.num_rows)
    _check_counts(record, num_tokens)
    return TokenTimes(request, time, np.concatenate(([0], np.cumsum(num_tokens))))


def inter_token_s(tokens: TokenTimes) -> np.ndarray:
    """Gaps between consecutive tokens of one request, pooled over requests, seconds, in token order."""
    return _gaps_ns(tokens) / NS_PER_S


def request_times(record: RunRecord, tokens: TokenTimes) -> RequestTimes:
    """TTFT, longest gap, TPOT, end-to-end latency and queue time of every request of ``record``."""
    arrival = record.array("requests", "arrival_ns")
    scheduled, was_scheduled = record.nullable_array("requests", "first_schedule_ns")
    finished = _finished(record)
    count = tokens.counts
    first, last = np.zeros_like(arrival), np.zeros_like(arrival)
    started = count > 0
    first[started] = tokens.time_ns[tokens.offsets[:-1][started]]
    last[started] = tokens.time_ns[tokens.offsets[1:][started] - 1]
    longest = np.zeros_like(arrival)
    several = count > 1
    if several.any():
        begins = np.cumsum(np.maximum(count - 1, 0)) - (count - 1)
        longest[several] = np.maximum.reduceat(_gaps_ns(tokens), begins[several])
    return RequestTimes(
        finished=finished,
        ttft_s=_seconds_where(started, first - arrival),
        itl_max_s=_seconds_where(several, longest),
        tpot_s=_seconds_where(finished & several, (last - first) / np.maximum(count - 1, 1)),
        e2e_s=_seconds_where(finished & started, last - arrival),
        queue_time_s=_seconds_where(was_scheduled, scheduled - arrival),
    )


def _runs(record: RunRecord) -> tuple[np.ndarray, ...]:
    """Per run, ordered by request and step: request row, step row, tokens, first decoding step after it."""
    steps = record.array("steps", "step")
    if np.any(np.diff(steps) <= 0):
        raise RecordError("steps: column step: expected strictly increasing numbers")
    row = _rows_of(record.array("emissions", "request"), record.array("requests", "request"), "request")
    first = _rows_of(record.array("emissions", "first_step"), steps, "step")
    count = record.array("emissions", "num_steps")
    # Null in a client's record, where every run is of one token: it sees no steps that decode.
    decoding = np.flatnonzero(record.nullable_array("steps", "num_decode_tokens")[0] > 0)
    next_decode = np.searchsorted(decoding, first, side="right")
    bad = np.flatnonzero((count < 1) | (next_decode + count - 1 > decoding.size))
    if bad.size:
        i = bad[0]
        raise RecordError(
            f"emissions: row {i}: {count[i]} tokens from step {steps[first[i]]} on; expected 1 to "
            f"{decoding.size - next_decode[i] + 1}: one for that step, one for each later step that decodes"
        )
    order = np.lexsort((first, row))
    commit = record.array("steps", "commit_ns")[decoding]
    return row[order], first[order], count[order], commit, next_decode[order]


def _rows_of(wanted: np.ndarray, keys: np.ndarray, what: str) -> np.ndarray:
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    repeated = np.flatnonzero(ordered[1:] == ordered[:-1])
    if repeated.size:
        raise RecordError(f"{what}s: {what} {ordered[repeated[0]]} has more than one row")
    place = np.minimum(np.searchsorted(ordered, wanted), max(ordered.size - 1, 0))
    known = ordered[place] == wanted if ordered.size else np.zeros(wanted.size, bool)
    if not known.all():
        row = np.flatnonzero(~known)[0]
        raise RecordError(f"emissions: row {row}: {what} {wanted[row]} is not in the table {what}s")
    return order[place]


def _check_counts(record: RunRecord, num_tokens: np.ndarray) -> None:
    stated = record.array("requests", "num_output_tokens")
    wrong = np.flatnonzero(stated != num_tokens)
    if wrong.size:
        row = wrong[0]
        request = record.array("requests", "request")[row]
        raise RecordError(
            f"requests: request {request}: num_output_tokens is {stated[row]}, "
            f"but its emissions hold {num_tokens[row]} tokens"
        )


def _gaps_ns(tokens: TokenTimes) -> np.ndarray:
    return np.diff(tokens.time_ns)[tokens.request[1:] == tokens.request[:-1]]


def _finished(record: RunRecord) -> np.ndarray:
    reasons = record.requests.column("finish_reason").combine_chunks().dictionary_encode()
    codes = [code for code, reason in enumerate(reasons.dictionary.to_pylist()) if reason in FINISHED]
    return np.isin(reasons.indices.to_numpy(), codes)


def _seconds_where(exists: np.ndarray, value_ns: np.ndarray) -> np.ndarray:
    return np.where(exists, value_ns / NS_PER_S, np.nan)
