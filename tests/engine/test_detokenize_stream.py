"""The stream against decoding all at once, for every kind of tokenizer (CASES T1)."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from detokenize_tokenizers import KINDS, TEXTS
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from pagedserve.engine.detokenize import REPLACEMENT, DetokenizerState, TokenPieces

PIECES = {kind: TokenPieces(tokenizer) for kind, tokenizer in KINDS.items()}
kinds = st.sampled_from(sorted(KINDS))
byte_kinds = st.sampled_from([kind for kind in sorted(KINDS) if kind != "metaspace"])

characters = st.one_of(
    st.sampled_from(sorted(set("".join(TEXTS)))),
    st.sampled_from(
        ["👩‍👩‍👧‍👦", "🏳️‍🌈", "🇺🇳", "e\u0301", "שָׁ", "\u200d", "\ufeff", "▁", "  ", "\x00", REPLACEMENT]
    ),
    st.characters(exclude_categories=["Cs"]),
)
texts = st.lists(characters, max_size=30).map("".join)


def stream(
    kind: str, ids: Sequence[int], *, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True
) -> list[str]:
    """The text of each push, and of the end."""
    state = DetokenizerState(PIECES[kind], prompt_ids=prompt_ids, skip_special_tokens=skip_special_tokens)
    return [state.push(token_id) for token_id in ids] + [state.finish()]


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("text", TEXTS)
def test_known_texts_come_out_as_they_went_in(kind, text):
    ids = KINDS[kind].encode(text).ids
    deltas = stream(kind, ids)
    assert "".join(deltas) == KINDS[kind].decode(ids)
    if kind == "byte_level":
        assert "".join(deltas) == text
        assert text.isascii() or "" in deltas[:-1], "no character was split, so nothing was tried"


@settings(max_examples=400, deadline=None)
@given(kinds, texts)
def test_the_stream_equals_decoding_all_at_once(kind, text):
    ids = KINDS[kind].encode(text).ids
    assert "".join(stream(kind, ids)) == KINDS[kind].decode(ids)


@settings(max_examples=200, deadline=None)
@given(byte_kinds, texts.filter(lambda text: REPLACEMENT not in text))
def test_a_character_comes_out_with_its_last_byte_and_not_before(kind, text):
    """After each token, what is out is all that is complete: decoding so far, without a broken tail."""
    ids = KINDS[kind].encode(text).ids
    deltas = stream(kind, ids)
    assert not any(REPLACEMENT in delta for delta in deltas)
    out = b""
    for count in range(1, len(ids) + 1):
        out += deltas[count - 1].encode()
        pieces = [PIECES[kind].piece(token_id) for token_id in ids[:count]]
        raw = b"".join(pieces)
        if kind in ("llama", "gguf_llama"):
            raw = raw.removeprefix(b" ")
        assert out == raw.decode(errors="ignore").encode()
        assert len(raw) - len(out) <= 3


@settings(max_examples=400, deadline=None)
@given(st.lists(st.integers(0, KINDS["byte_level"].get_vocab_size() + 2), max_size=40), st.booleans())
def test_byte_level_noise_equals_decoding_all_at_once(ids, skip):
    """Any tokens in any order: broken sequences, specials between bytes, added tokens, ids of no token."""
    expected = KINDS["byte_level"].decode(ids, skip_special_tokens=skip)
    assert "".join(stream("byte_level", ids, skip_special_tokens=skip)) == expected


@settings(max_examples=400, deadline=None)
@given(byte_kinds.filter(lambda kind: kind != "byte_level"), st.data())
def test_byte_fallback_noise_equals_decoding_all_at_once(kind, data):
    """Whole characters in bytes, and runs with no whole character, which come to one U+FFFD a byte."""
    vocab = KINDS[kind].get_vocab()
    words = st.sampled_from(sorted(token for token in vocab if not token.startswith("<0x"))).map(
        lambda t: [t]
    )
    spelled = st.sampled_from("א你👩é a").map(lambda char: [f"<0x{byte:02X}>" for byte in char.encode()])
    broken = st.sampled_from([b"\x80", b"\xf0\x9f", b"\xe4\xbd", b"\xff\xff", b"\xc3"]).map(
        lambda run: ["quick", *(f"<0x{byte:02X}>" for byte in run), "dog"]
    )
    vocab |= {"quick": vocab["▁"], "dog": vocab["d"]}
    ids = [vocab[token] for group in data.draw(st.lists(words | spelled | broken)) for token in group]
    if data.draw(st.booleans()):
        ids += [vocab["▁"], vocab["<0xE4>"], vocab["<0xBD>"]]
    skip = data.draw(st.booleans())
    expected = KINDS[kind].decode(ids, skip_special_tokens=skip)
    assert "".join(stream(kind, ids, skip_special_tokens=skip)) == expected


@pytest.mark.parametrize("kind", ["byte_level", "llama", "gguf_llama", "gemma"])
def test_an_incomplete_tail_is_flushed_once(kind):
    """CASES T1: the limit falls inside a character."""
    tokenizer = KINDS[kind]
    ids = tokenizer.encode("ok 👩").ids[:-1]
    state = DetokenizerState(PIECES[kind])
    text = "".join(state.push(token_id) for token_id in ids)
    assert text.lstrip() == "ok "
    tail = state.finish()
    assert text + tail == tokenizer.decode(ids)
    assert set(tail) == {REPLACEMENT}
    assert state.finish() == ""
    with pytest.raises(AssertionError, match="after the end"):
        state.push(ids[0])


def test_byte_fallback_keeps_whole_characters_before_a_broken_one():
    """Here the stream is better than decoding all at once, which voids the whole run of byte tokens."""
    vocab = KINDS["llama"].get_vocab()
    ids = [vocab[f"<0x{byte:02X}>"] for byte in "你".encode() + "好".encode()[:2]]
    assert KINDS["llama"].decode(ids) == REPLACEMENT * 5
    assert "".join(stream("llama", ids)) == "你" + REPLACEMENT * 2


@settings(max_examples=300, deadline=None)
@given(kinds, texts, st.data())
def test_behind_a_prompt_the_stream_is_what_the_output_adds(kind, text, data):
    ids = KINDS[kind].encode(text).ids
    cut = data.draw(st.integers(0, len(ids)))
    # Where the prompt ends inside a character, the output completes it, so the character is the output's.
    prompt = "".join(stream(kind, ids[:cut])[:-1])
    output = "".join(stream(kind, ids[cut:], prompt_ids=ids[:cut]))
    assert prompt + output == KINDS[kind].decode(ids)


def test_a_leading_space_stays_behind_a_prompt_and_goes_at_the_start():
    for kind in ("llama", "metaspace"):
        ids = KINDS[kind].encode("The quick").ids
        later = KINDS[kind].encode("lazy").ids
        bos = KINDS[kind].get_vocab()["<s>"]
        assert "".join(stream(kind, later)) == "lazy"
        assert "".join(stream(kind, later, prompt_ids=[bos])) == "lazy"
        assert "".join(stream(kind, later, prompt_ids=[bos, *ids])) == " lazy"
        assert "".join(stream(kind, [bos, *later], skip_special_tokens=False)) == "<s> lazy"


def test_no_token_is_looked_up_twice_and_nothing_is_decoded_again():
    class CountingTokenizer:
        """Answers what TokenPieces may ask, and counts."""

        num_lookups = 0

        def to_str(self) -> str:
            return KINDS["byte_level"].to_str()

        def get_added_tokens_decoder(self):
            return KINDS["byte_level"].get_added_tokens_decoder()

        def id_to_token(self, token_id: int) -> str | None:
            self.num_lookups += 1
            return KINDS["byte_level"].id_to_token(token_id)

    counting = CountingTokenizer()
    state = DetokenizerState(TokenPieces(counting))  # pyright: ignore[reportArgumentType]
    ids = KINDS["byte_level"].encode(TEXTS[4] * 50).ids
    assert "".join(state.push(token_id) for token_id in ids) == TEXTS[4] * 50
    assert counting.num_lookups == len(set(ids))


@pytest.mark.parametrize(
    ("decoder", "words"),
    [
        (decoders.WordPiece(), "WordPiece"),
        (decoders.BPEDecoder(), "BPEDecoder"),
        (decoders.Strip(content=" ", left=0, right=1), "Strip"),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.CTC()]), "CTC"),
        (None, "no decoder"),
    ],
)
def test_a_decoder_that_cannot_be_streamed_is_named(decoder, words):
    tokenizer = Tokenizer(models.BPE())
    if decoder is not None:
        tokenizer.decoder = decoder
    with pytest.raises(ValueError, match=words):
        TokenPieces(tokenizer)


def test_a_slow_tokenizer_is_refused_by_name():
    with pytest.raises(ValueError, match="object is not a fast tokenizer"):
        TokenPieces.of(object())


@pytest.mark.long
def test_smollm2_streams_as_it_decodes():
    home = Path(os.environ.get("PAGEDSERVE_HOME", Path.home() / ".cache" / "pagedserve"))
    files = [path for path in home.rglob("*.gguf") if "smollm2" in path.name.lower()]
    if not files:
        pytest.skip("no SmolLM2 GGUF in the model cache (PAGEDSERVE_HOME): run `pagedserve generate` once")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(files[0].parent, gguf_file=files[0].name)
    pieces = TokenPieces.of(tokenizer)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        state = DetokenizerState(pieces)
        deltas = [state.push(token_id) for token_id in ids] + [state.finish()]
        assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=True) == text
