"""Text from tokens as they come: the same as from all of them at once, without decoding any token twice.

A token is a piece of a byte string, not of text: one character may take several tokens. So each token is
turned into its bytes, and an incremental UTF-8 decoder lets a character out once its last byte is there.
"""

import codecs
import json
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_EACH_BYTE = "pagedserve.replace_each_byte"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)


def _byte_alphabet() -> dict[str, int]:
    """The printable characters that stand for the 256 bytes in byte-level BPE vocabularies (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


class TokenPieces:
    """Each token's bytes, read off the decoder of one tokenizer; one object serves all requests.

    Understands the decoders of the Llama family: byte-level BPE; and SentencePiece style, where a mark stands
    for the space, bytes have tokens of their own (byte fallback) and one space at the very start is dropped.
    ValueError names any other decoder.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._pieces: dict[int, bytes] = {}
        self._alphabet: dict[str, int] | None = None
        self._spaces: list[tuple[str, str]] = []
        self._start_mark: str | None = None  # Metaspace: every such mark in the first token is dropped
        self._start_space: str | None = None  # Strip: one such character at the start of the text is dropped
        self._has_byte_tokens = False
        decoder = json.loads(tokenizer.to_str())["decoder"]
        if decoder is None:
            raise ValueError(
                "the tokenizer has no decoder, so its tokens do not join to text: use a fast tokenizer"
            )
        for step in decoder.get("decoders", [decoder]):
            self._take_step(step)
        # As the decoders do: byte-level replaces each ill-formed sequence, byte fallback each of its bytes.
        self.utf8_errors = _EACH_BYTE if self._has_byte_tokens else "replace"

    @classmethod
    def of(cls, tokenizer: Any) -> "TokenPieces":
        """From a Hugging Face fast tokenizer; ValueError for one without a `tokenizers` backend."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ValueError(
                f"{type(tokenizer).__name__} is not a fast tokenizer: load one with a tokenizer.json"
            )
        return cls(backend)

    def encode(self, text: str) -> list[int]:
        """A text's token ids, without special ones around them."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def piece(self, token_id: int) -> bytes:
        """The token's bytes; none for an id the tokenizer does not know, as when decoding all at once."""
        piece = self._pieces.get(token_id)
        if piece is None:
            token = self._tokenizer.id_to_token(token_id)
            piece = self._pieces[token_id] = b"" if token is None else self._to_bytes(token)
        return piece

    def first_piece(self, token_id: int) -> bytes:
        """The token's bytes where it opens the text: without the space that the tokenizer puts there."""
        if self._start_mark is not None:
            token = self._tokenizer.id_to_token(token_id)
            return b"" if token is None else self._to_bytes(token.replace(self._start_mark, ""))
        piece = self.piece(token_id)
        return piece if self._start_space is None else piece.removeprefix(self._start_space.encode())

    def _to_bytes(self, token: str) -> bytes:
        if self._alphabet is not None:
            values = [self._alphabet.get(char) for char in token]
            known = [value for value in values if value is not None]
            # An added token need not be spelled in the alphabet; it then stands for itself.
            return bytes(known) if len(known) == len(values) else token.encode()
        if self._has_byte_tokens and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        for mark, space in self._spaces:
            token = token.replace(mark, space)
        return token.encode()

    def _take_step(self, step: dict[str, Any]) -> None:
        readers: dict[str, Callable[[dict[str, Any]], bool]] = {
            "ByteLevel": self._take_byte_level,
            "ByteFallback": self._take_byte_fallback,
            "Fuse": lambda _: True,
            "Replace": self._take_replace,
            "Strip": self._take_strip,
            "Metaspace": self._take_metaspace,
        }
        reader = readers.get(step["type"])
        if reader is None or not reader(step):
            raise ValueError(
                f"the tokenizer's decoder has a step {json.dumps(step)} that cannot be streamed; supported: "
                f"{', '.join(readers)}, with plain patterns and at most one space stripped at the start"
            )

    def _take_byte_level(self, _: dict[str, Any]) -> bool:
        self._alphabet = _byte_alphabet()
        return True

    def _take_byte_fallback(self, _: dict[str, Any]) -> bool:
        self._has_byte_tokens = True
        return True

    def _take_replace(self, step: dict[str, Any]) -> bool:
        mark = step["pattern"].get("String")
        if mark is not None:
            self._spaces.append((mark, step["content"]))
        return mark is not None

    def _take_strip(self, step: dict[str, Any]) -> bool:
        if step["start"] == 1:
            self._start_space = step["content"]
        return step["start"] <= 1 and step["stop"] == 0

    def _take_metaspace(self, step: dict[str, Any]) -> bool:
        self._spaces.append((step["replacement"], " "))
        if step["prepend_scheme"] != "never":
            self._start_mark = step["replacement"]
        return True


class DetokenizerState:
    """One request's output text, token by token; constant work per token.

    The text is what the output adds to the prompt's, so a leading space is kept behind a prompt. Text comes
    out in whole characters. Two kinds of bytes are not characters and become U+FFFD: ill-formed ones as soon
    as that is certain, and an incomplete tail when the output ends.

    For well-formed text the concatenation equals `Tokenizer.decode`. For ill-formed bytes too with byte-level
    BPE. With byte fallback, `Tokenizer.decode` turns a whole run of byte tokens into U+FFFD when any of it is
    ill-formed; here characters that were complete stay.
    """

    def __init__(
        self, pieces: TokenPieces, *, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._pieces = pieces
        self._skipped_ids = pieces.special_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")(pieces.utf8_errors)
        self._at_start = not any(self._adds_text(token_id) for token_id in prompt_ids)
        self._decoder.decode(self._prompt_tail(prompt_ids))
        self._finished = False

    def push(self, token_id: int) -> str:
        """The text that this token completes, often empty in the middle of a character."""
        assert not self._finished, f"token {token_id} after the end of the output"
        if token_id in self._skipped_ids:
            return ""
        if not self._at_start:
            return self._decoder.decode(self._pieces.piece(token_id))
        self._at_start = not self._adds_text(token_id)
        return self._decoder.decode(self._pieces.first_piece(token_id))

    def finish(self) -> str:
        """U+FFFD for an incomplete character at the end, else nothing; nothing when asked again."""
        self._finished = True
        return self._decoder.decode(b"", final=True)

    def _adds_text(self, token_id: int) -> bool:
        return token_id not in self._skipped_ids and bool(self._pieces.piece(token_id))

    def _prompt_tail(self, prompt_ids: Sequence[int]) -> bytes:
        """The prompt's last bytes, four or more: they hold whatever character it leaves incomplete."""
        tail = b""
        for token_id in reversed(prompt_ids):
            if token_id not in self._skipped_ids:
                tail = self._pieces.piece(token_id) + tail
            if len(tail) >= 4:
                break
        return tail
