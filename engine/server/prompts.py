"""Text to token ids and back, chat templates included, in threads of their own beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from tokenizers import Tokenizer

from pagedserve.engine.detokenize import TokenPieces
from pagedserve.engine.server.errors import bad_request, shown
from pagedserve.engine.server.schema import ChatOptions, Message, Prompt

T = TypeVar("T")
NUM_THREADS = 2
# What a request may hand to a chat template is data; these are arguments of the function that renders it.
_RESERVED = frozenset(
    {"conversation", "messages", "tokenize", "chat_template", "tools", "documents", "return_dict"}
    | {"add_generation_prompt", "continue_final_message", "padding", "truncation", "max_length"}
    | {"return_tensors", "return_assistant_tokens_mask", "tokenizer_kwargs", "self"}
)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt's token ids, and what of its text the answer repeats."""

    ids: list[int]
    text: str = ""


class PromptCodec:
    """A Hugging Face fast tokenizer for a server.

    The tokenizer proper is only ever read, which threads may do at the same time, and releases the
    interpreter's lock while it works.
    """

    def __init__(self, tokenizer: Any, max_model_len: int) -> None:
        """ValueError for one that is not fast, or whose text cannot be streamed.

        ``max_model_len``: tokens that a prompt may have; what is far longer is refused before it is tokenised.
        """
        self._max_model_len = max_model_len
        self._longest_piece: int | None = None
        self._pieces = TokenPieces.of(tokenizer)
        self._tokenizer = tokenizer
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        self._threads = ThreadPoolExecutor(NUM_THREADS, "pagedserve-tokenizer")

    def close(self) -> None:
        """Stop the threads, without waiting for what they do."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """A function of this object, in one of its threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    def encode(self, prompt: Prompt, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; ids stay as they are."""
        if not isinstance(prompt, str):
            return prompt
        return self._backend.encode_batch_fast([prompt], add_special_tokens=add_special_tokens)[0].ids

    def prompt(self, prompt: Prompt, add_special_tokens: bool, echo: bool, skips_special: bool) -> Encoded:
        """A prompt of completions; ``echo``: with its text, of ids without special tokens if they are skipped."""
        if isinstance(prompt, str):
            self._check_length(prompt, "prompt")
        ids = self.encode(prompt, add_special_tokens)
        if not echo:
            return Encoded(ids)
        return Encoded(ids, prompt if isinstance(prompt, str) else self.decode(ids, skips_special))

    def chat(self, options: ChatOptions) -> Encoded:
        """Messages, through the model's chat template. `ApiError` 400 if it refuses them."""
        rendered = self._render(options)
        self._check_length(rendered, "messages")
        return Encoded(self.encode(rendered, options.add_special_tokens))

    def _check_length(self, text: str, name: str) -> None:
        """Refuse what is too long whatever its tokens are: tokenising megabytes keeps others waiting for seconds."""
        if len(text) <= 4 * self._max_model_len:
            return
        if self._longest_piece is None:
            ids = range(self._backend.get_vocab_size())
            self._longest_piece = max(len(self._pieces.piece(token_id)) for token_id in ids)
        num_bytes, most = len(text.encode()), self._max_model_len * self._longest_piece
        if num_bytes > most:
            raise bad_request(
                f"{name} has {num_bytes:,} bytes; no token has more than {self._longest_piece}, and the model reads "
                f"{self._max_model_len} tokens: send {most:,} bytes or fewer",
                name,
                "context_length_exceeded",
            )

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of ids, those of a prompt or a client's."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def piece(self, token_id: int) -> bytes:
        """One token's bytes, which need not be whole characters."""
        return self._pieces.piece(token_id)

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Tokens as the vocabulary spells them."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def _render(self, options: ChatOptions) -> str:
        if self._tokenizer.chat_template is None:
            raise bad_request(
                "this model's tokenizer has no chat template; use /v1/completions", code="no_chat_template"
            )
        if options.add_generation_prompt and options.continue_final_message:
            raise bad_request(
                "continue_final_message and add_generation_prompt are both true; set one of them to false",
                "continue_final_message",
            )
        extra = _template_arguments(options.chat_template_kwargs or {})
        messages = [_message(message, index) for index, message in enumerate(options.messages)]
        try:
            return self._tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=options.add_generation_prompt,
                continue_final_message=options.continue_final_message,
                **extra,
            )
        except Exception as error:  # a template is a program of the model's author
            why = " ".join(str(error).split())
            raise bad_request(
                f"the model's chat template refuses these messages ({type(error).__name__}: {shown(why)})",
                "messages",
            ) from error


def _template_arguments(given: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in given:
        if name in _RESERVED:
            raise bad_request(
                f"chat_template_kwargs has {name}, which is no variable of a template; leave it out",
                "chat_template_kwargs",
            )
    return given


def _message(message: Message, index: int) -> dict[str, Any]:
    """A message for the template, its content one text."""
    content = message.content
    if isinstance(content, list):
        content = "\n".join(_part(part, f"messages[{index}].content[{i}]") for i, part in enumerate(content))
    extra = message.model_extra or {}
    return {**extra, "role": message.role, "content": content if content is not None else ""}


def _part(part: Mapping[str, Any], where: str) -> str:
    if part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise bad_request(
            f'{where} is {shown(part)}; this model reads text: give {{"type": "text", "text": ...}}',
            "messages",
        )
    return part["text"]
