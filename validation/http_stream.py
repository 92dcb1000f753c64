"""What a streamed completion says: server-sent events, and which of them brought how many tokens.

The format of events is that of the HTML standard, section 9.2 (only their data is used); what is in them is
the OpenAI completions protocol, with what vLLM adds to it.
"""

import json
from dataclasses import dataclass, field
from typing import Any

END = b"[DONE]"
KNOWN_ENDINGS = ("stop", "length", "abort")
SHOWN_CHARS = 200


class StreamError(ValueError):
    """A stream says that its request failed, or says something that is not a completion."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a client saw of one request; times in ns on the client's clock.

    ``arrivals`` holds (time, tokens) for every chunk that brought tokens, in order. ``num_usage_tokens`` is
    the output length the server stated and ``num_cached_tokens`` the prompt tokens it found in its prefix
    cache, None where it did not say. ``counting`` is how the tokens of a chunk are known, see `token_counts`.
    ``error`` says why ``finish_reason`` is "error".
    """

    sent_ns: int
    end_ns: int
    arrivals: tuple[tuple[int, int], ...]
    finish_reason: str
    error: str | None = None
    num_usage_tokens: int | None = None
    num_cached_tokens: int | None = None
    counting: str = "stated"

    @property
    def num_tokens(self) -> int:
        """Tokens received."""
        return sum(num_tokens for _, num_tokens in self.arrivals)


class EventsState:
    """Bytes to the data of events, whatever pieces the bytes come in."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of every event that ``piece`` completes."""
        # Lines end with LF, CR LF or CR and nothing else: text in JSON may hold other separators. A CR at
        # the end waits for what follows it.
        text = self._rest + piece
        held = b"\r" if text.endswith(b"\r") else b""
        text = text.removesuffix(held)
        *lines, rest = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = rest + held
        events: list[bytes] = []
        for line in lines:
            if not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
        return events

    def close(self) -> list[bytes]:
        """The data of an event whose closing blank line never came: some servers leave out the last."""
        return self.feed(b"\n\n")


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event with a choice: when it came, whether it brought text, its tokens if the server counted them."""

    at_ns: int
    has_text: bool
    num_tokens: int | None


@dataclass(slots=True)
class ReplyState:
    """A reply as it comes in, event by event."""

    sent_ns: int
    chunks: list[Chunk] = field(default_factory=list)
    finish_reason: str | None = None
    finish_ns: int | None = None
    num_usage_tokens: int | None = None
    num_cached_tokens: int | None = None

    def take(self, data: bytes, at_ns: int) -> None:
        """Read the data of an event that came at ``at_ns``; raises `StreamError` for one that is none of ours."""
        if data.strip() == END:
            return
        try:
            event = json.loads(data)
        except ValueError as error:
            raise StreamError(f"an event is not JSON: {shown(data)}") from error
        if not isinstance(event, dict):
            raise StreamError(f"an event is not an object: {shown(data)}")
        if event.get("error") or event.get("object") == "error":
            raise StreamError(f"the server reports: {error_message(event)}")
        before = self.num_usage_tokens
        self._take_usage(event.get("usage"))
        choices = event.get("choices") or []
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise StreamError(f"the choices of an event are no list of objects: {shown(data)}")
        for choice in choices:
            self._take_choice(choice, before, event.get("usage"), at_ns)

    def reply(self, end_ns: int, error: str | None = None) -> Reply:
        """What is known when the stream has ended at ``end_ns``, with ``error`` if it failed."""
        if error is None and self.finish_reason is None:
            error = "the stream ended without a finish_reason"
        elif error is None and self.finish_reason not in KNOWN_ENDINGS:
            error = f"the server ended it with finish_reason {self.finish_reason!r}"
        counts, counting = token_counts(self.chunks, self.num_usage_tokens)
        if error is None and (self.num_usage_tokens or 0) > 0 and not self.chunks:
            error = f"the server states {self.num_usage_tokens} output tokens and sent none"
        arrived = zip((chunk.at_ns for chunk in self.chunks), counts, strict=True)
        return Reply(
            sent_ns=self.sent_ns,
            end_ns=end_ns if error is not None or self.finish_ns is None else self.finish_ns,
            arrivals=tuple((at_ns, count) for at_ns, count in arrived if count),
            finish_reason="error" if error is not None else str(self.finish_reason),
            error=error,
            num_usage_tokens=self.num_usage_tokens,
            num_cached_tokens=self.num_cached_tokens,
            counting=counting,
        )

    def _take_usage(self, usage: Any) -> None:
        if not isinstance(usage, dict):
            return
        total = usage.get("completion_tokens")
        if isinstance(total, int):
            if total < (self.num_usage_tokens or 0):
                raise StreamError(f"completion_tokens falls from {self.num_usage_tokens} to {total}")
            self.num_usage_tokens = total
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        if isinstance(cached, int):
            self.num_cached_tokens = cached

    def _take_choice(self, choice: dict[str, Any], before: int | None, usage: Any, at_ns: int) -> None:
        """One choice; ``before`` is the output length stated before this event."""
        logprobs = choice.get("logprobs")
        tokens = choice.get("token_ids") or (logprobs.get("tokens") if isinstance(logprobs, dict) else None)
        num_tokens = None
        if isinstance(tokens, list):
            num_tokens = len(tokens)
        elif isinstance(usage, dict) and self.num_usage_tokens is not None:
            num_tokens = self.num_usage_tokens - (before or 0)
        self.chunks.append(Chunk(at_ns, bool(choice.get("text")), num_tokens))
        if choice.get("finish_reason") is not None:
            self.finish_reason, self.finish_ns = choice["finish_reason"], at_ns


def token_counts(chunks: list[Chunk], num_tokens: int | None) -> tuple[list[int], str]:
    """Tokens of each chunk, and how they are known; ``num_tokens``: of the whole reply as stated, if it was.

    "stated": the server counted those of every chunk, by token ids, logprobs or a running usage; or there are
    as many chunks with text as tokens: one each. "spread": only their sum is known, and chunk i of m gets its
    even share of n tokens, ceil(n (i+1) / m) up to and including it, so the first token comes with the first
    chunk. "assumed": not even their sum is known; each chunk with text counts as one token.

    Chunks without text share in nothing where others have text: whether they brought a token that cannot
    be shown yet, a client cannot tell.
    """
    if all(chunk.num_tokens is not None for chunk in chunks):
        return [chunk.num_tokens or 0 for chunk in chunks], "stated"
    carries = [chunk.has_text for chunk in chunks]
    if num_tokens is None:
        return [int(has_text) for has_text in carries], "assumed"
    if not any(carries):
        carries = [True] * len(chunks)
    num_carriers = sum(carries)
    counts, given, carrier = [], 0, 0
    for has_share in carries:
        carrier += has_share
        share = -(-num_tokens * carrier // num_carriers)
        counts.append(share - given)
        given = share
    return counts, "stated" if num_carriers == num_tokens else "spread"


def error_message(content: Any) -> str:
    """The message in an error as OpenAI, vLLM and FastAPI servers write them; otherwise the content itself."""
    found = content
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(key):
            found = found[key]
    return shown(found if isinstance(found, str | bytes) else json.dumps(found))


def shown(text: str | bytes) -> str:
    """Text of a server on one line of bounded length."""
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARS else line[: SHOWN_CHARS - 1] + "…"
