"""Tokenizers of every kind, whose special tokens stand at odd places, for tests that nobody assumes where they are."""

import json
from collections.abc import Callable, Sequence

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from manyformer.data.tokenizers.foreign_tokenizer import ForeignTokenizer
from manyformer.data.tokenizers.saved_tokenizers import train_tokenizer
from manyformer.data.tokenizers.tokenizer import Tokenizer

LINES = [
    "the cat sat on the mat. the dog ran far away!",
    "dogs chased green birds across fields because cats can't fly",
    "It cost $3.50, said O'Neill & Sons of Zürich.",
]
LETTERS = sorted(set("".join(LINES).lower()) - {" "})
SPECIAL = {"pad": "[PAD]", "bos": "[CLS]", "eos": "[SEP]", "unk": "[UNK]", "mask": "[MASK]"}


def _scattered(pieces: Sequence[str]) -> list[str]:
    """The pieces with special tokens and placeholders between them, none of which is among the first five ids."""
    names = ["[unused0]", "[MASK]", "[unused1]", "[SEP]", "[PAD]", "[UNK]", "[unused2]", "[CLS]"]
    first, rest = list(pieces[:6]), list(pieces[6:])
    for place, name in enumerate(names):
        rest.insert(2 * place, name)
    return [*first, *rest]


def _foreign(inner: tokenizers.Tokenizer) -> ForeignTokenizer:
    inner.add_special_tokens(list(SPECIAL.values()))
    return ForeignTokenizer.of_files(json.loads(inner.to_str()), SPECIAL, [])


def word_pieces() -> ForeignTokenizer:
    """BERT's kind: lower case without accents, and ## before what continues a word."""
    words = ["the", "cat", "dog", "bird", "##s"]
    pieces = _scattered([*words, *LETTERS, *(f"##{letter}" for letter in LETTERS if letter.isalnum())])
    inner = tokenizers.Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    inner.normalizer, inner.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece(prefix="##")
    return _foreign(inner)


def unigram() -> ForeignTokenizer:
    """XLNet's and T5's kind: pieces with probabilities, where a space is a character of the next word."""
    pieces = _scattered(["▁", "▁the", "▁cat", "▁dog", *LETTERS, *(letter.upper() for letter in "inoszt")])
    scores = [(piece, -float(index % 7) - 1) for index, piece in enumerate(pieces)]
    inner = tokenizers.Tokenizer(models.Unigram(scores, unk_id=pieces.index("[UNK]"), byte_fallback=False))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return _foreign(inner)


def byte_level() -> ForeignTokenizer:
    """RoBERTa's and GPT-2's kind: byte pairs, where a space is a byte of the next word."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner.train_from_iterator(
        LINES * 3, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    return _foreign(inner)


def byte_fallback() -> ForeignTokenizer:
    """Llama's kind: a space is a character of the next word, and unknown characters are bytes."""
    pieces = _scattered(["▁", *LETTERS, *(f"<0x{byte:02X}>" for byte in range(256)), "▁t", "▁c"])
    merges = [("▁", "t"), ("▁", "c")]
    model = models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, unk_token="[UNK]", byte_fallback=True)
    inner = tokenizers.Tokenizer(model)
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _foreign(inner)


FOREIGN: dict[str, Callable[[], ForeignTokenizer]] = {
    "word-pieces": word_pieces,
    "unigram": unigram,
    "byte-level": byte_level,
    "byte-fallback": byte_fallback,
}


def native(kind: str) -> Tokenizer:
    """A tokenizer of this library."""
    return train_tokenizer(kind, LINES * 3, 300 if kind == "bpe" else None)


KINDS = (*FOREIGN, "bpe", "char", "byte", "word")


def tokenizer_of_kind(kind: str) -> Tokenizer:
    """The tokenizer of one of `KINDS`."""
    return FOREIGN[kind]() if kind in FOREIGN else native(kind)
