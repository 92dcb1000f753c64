"""Small tokenizers of each kind, trained in memory on a text of many scripts."""

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXTS = [
    "The quick brown fox jumps over the lazy dog. Ein Wiesel saß auf einem Kiesel, inmitten Bachgeriesel.",
    "שָׁלוֹם עוֹלָם, זה מבחן של עברית עם ניקוד.",
    "你好，世界。今天天气很好。日本語のテキストも少し。안녕하세요 세계",
    "Cafe\u0301 e\u0301te\u0301 nai\u0308ve; Z\u0351\u036b\u0343\u036a\u0302\u036b\u033d\u034f algo",
    "👩‍👩‍👧‍👦 👨🏽‍🚀 🏳️‍🌈 🇺🇳 family, astronaut, flags",
    "    def f(x):\n\treturn x  # two  spaces\n\n",
]
SPECIAL = ["<unk>", "<s>", "</s>"]


def byte_level() -> Tokenizer:
    """GPT-2 style; 40 merges on 256 bytes leave most characters split over tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False), AddedToken("日本", special=False)])
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    return tokenizer


def byte_fallback(decoder: decoders.Decoder) -> Tokenizer:
    """Llama 2 style: a mark for the space, and a token for each byte of what the vocabulary lacks."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=150, show_progress=False)
    trained.train_from_iterator(TEXTS[:1], trainer)
    saved = json.loads(trained.to_str())["model"]
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *saved["vocab"], "▁▁", "▁▁▁▁"]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    merges = [tuple(merge) for merge in saved["merges"]] + [("▁", "▁"), ("▁▁", "▁▁")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def metaspace() -> Tokenizer:
    """SentencePiece style without byte tokens: the decoder drops the marks of the first token itself."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


REPLACE, BYTES, FUSE = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
STRIP = decoders.Strip(content=" ", left=1)

KINDS = {
    "byte_level": byte_level(),
    "llama": byte_fallback(decoders.Sequence([REPLACE, BYTES, FUSE, STRIP])),
    "gguf_llama": byte_fallback(decoders.Sequence([BYTES, FUSE, REPLACE, STRIP])),
    "gemma": byte_fallback(decoders.Sequence([REPLACE, BYTES, FUSE])),
    "metaspace": metaspace(),
}
