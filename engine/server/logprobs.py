"""Logprobs in the two forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pagedserve.engine.outputs import PromptLogprobs
from pagedserve.engine.sampling.logprobs import PositionLogprobs, TokenLogprob
from pagedserve.engine.server.prompts import PromptCodec


@dataclass(frozen=True, slots=True)
class TokenNames:
    """How tokens are called in an answer; ``as_ids``: "token_id:17" instead of their text (vLLM)."""

    codec: PromptCodec
    as_ids: bool = False

    def unique(self, token_id: int) -> str:
        """A name that no other text has: what is no whole text is spelled as OpenAI does, "bytes:\\xe2\\x80"."""
        if self.as_ids:
            return f"token_id:{token_id}"
        piece = self.codec.piece(token_id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def readable(self, token_id: int) -> str:
        """Its text, U+FFFD for what is none; the bytes stand beside it."""
        return f"token_id:{token_id}" if self.as_ids else self.codec.piece(token_id).decode(errors="replace")


@dataclass(slots=True)
class CompletionLogprobsState:
    """``logprobs`` of a completions choice; ``offset``: characters of text before the next token."""

    names: TokenNames
    offset: int = 0
    content: dict[str, list[Any]] = field(default_factory=lambda: _empty())

    def add(self, positions: Sequence[PositionLogprobs]) -> None:
        """The tokens of a delta."""
        for position in positions:
            name = self.names.unique(position.chosen.token_id)
            self.content["tokens"].append(name)
            self.content["token_logprobs"].append(position.chosen.logprob)
            self.content["text_offset"].append(self.offset)
            # The sampled token last, so that of two tokens of one text its own logprob is the one told.
            all_of_them = (*position.top, position.chosen)
            self.content["top_logprobs"].append(
                {self.names.unique(token.token_id): token.logprob for token in all_of_them}
            )
            self.offset += len(self.names.readable(position.chosen.token_id))

    def add_prompt(
        self, token_ids: Sequence[int], positions: PromptLogprobs, text: str, num_top: int
    ) -> None:
        """The tokens of a prompt that is repeated as ``text``; nothing is known of the first one."""
        for token_id, position in zip(token_ids, positions, strict=True):
            top = None
            if position is not None:
                all_of_them = (*position.top[:num_top], position.chosen)
                top = {self.names.unique(token.token_id): token.logprob for token in all_of_them}
            self.content["tokens"].append(self.names.unique(token_id))
            self.content["token_logprobs"].append(None if position is None else position.chosen.logprob)
            self.content["text_offset"].append(self.offset)
            self.content["top_logprobs"].append(top)
            self.offset = min(len(text), self.offset + len(self.names.readable(token_id)))
        self.offset = len(text)

    def take(self) -> dict[str, list[Any]]:
        """What was added since the last time."""
        content, self.content = self.content, _empty()
        return content


def _empty() -> dict[str, list[Any]]:
    return {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}


def prompt_logprobs(
    names: TokenNames, positions: PromptLogprobs | None, num_top: int
) -> list[dict[str, Any] | None] | None:
    """``prompt_logprobs`` in vLLM's form: by token id, the likeliest and the prompt's own."""
    if positions is None:
        return None
    return [
        None
        if position is None
        else {
            str(token.token_id): {
                "logprob": token.logprob,
                "rank": token.rank,
                "decoded_token": names.readable(token.token_id),
            }
            for token in (position.chosen, *position.top[:num_top])
        }
        for position in positions
    ]


def chat_logprobs(names: TokenNames, positions: Sequence[PositionLogprobs]) -> list[dict[str, Any]]:
    """``logprobs.content`` of a chat choice."""
    return [
        {
            **_chat_token(names, position.chosen),
            "top_logprobs": [_chat_token(names, token) for token in position.top],
        }
        for position in positions
    ]


def _chat_token(names: TokenNames, token: TokenLogprob) -> dict[str, Any]:
    piece = names.codec.piece(token.token_id)
    return {"token": names.readable(token.token_id), "logprob": token.logprob, "bytes": list(piece)}
