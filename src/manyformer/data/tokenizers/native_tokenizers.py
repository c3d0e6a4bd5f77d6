"""Tokenizers of this library for text: by characters, bytes, words, and learned pairs of bytes."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from typing import Any, SupportsIndex

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from manyformer.base.errors import UserError
from manyformer.base.libraries.tokenizer_rules import read_tokenizer
from manyformer.data.tokenizers.tokenizer import SPECIALS, NativeTokenizer, StreamDecoder, TextTokens, TokenIds

_FIRST = len(SPECIALS)
# Words that occur once become unk, so that the embedding of unk is trained.
_MIN_WORD_COUNT = 2
_MIN_BPE_VOCAB = len(SPECIALS) + 256


class CharTokenizer(NativeTokenizer):
    """One token per character of the training text, in code point order; characters outside it are unk."""

    kind = "char"

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = "".join(sorted(set(characters)))
        if not self.characters:
            raise UserError("a character vocabulary needs text to learn from, and the text is empty")
        self.reads_spaces = " " in self.characters

    @property
    def vocab(self) -> int:
        return _FIRST + len(self.characters)

    @cached_property
    def _ids(self) -> TokenIds:
        # one entry for each code point of Unicode, so that a text is encoded by a single lookup
        table = np.full(0x110000, self.unk, dtype=np.int32)
        table[_code_points(self.characters)] = np.arange(_FIRST, self.vocab, dtype=np.int32)
        return table

    def encode_array(self, text: str) -> TokenIds:
        return self._ids[_code_points(text)]

    def encode_spans(self, text: str) -> TextTokens:
        ids = self.encode_array(text)
        starts = np.arange(len(ids), dtype=np.int32)
        return TextTokens(ids, starts, starts + 1)

    def token_bytes(self, token: int) -> bytes:
        return self.characters[token - _FIRST].encode()

    def content(self) -> dict[str, Any]:
        return {"characters": self.characters}

    @classmethod
    def restore(cls, content: dict[str, Any]) -> "CharTokenizer":
        return cls(content["characters"])

    @classmethod
    def learn(cls, texts: Iterable[str], size: int | None) -> "CharTokenizer":
        assert size is None
        # marks in a table instead of a set: texts may have billions of characters
        occurs = np.zeros(0x110000, dtype=np.bool_)
        for text in texts:
            occurs[_code_points(text)] = True
        return cls(map(chr, np.flatnonzero(occurs).tolist()))


class ByteTokenizer(NativeTokenizer):
    """One token per byte of UTF-8: 256 tokens and the special ones, without unknown text."""

    kind = "byte"

    @property
    def vocab(self) -> int:
        return _FIRST + 256

    def encode_array(self, text: str) -> TokenIds:
        return np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.int32) + _FIRST

    def encode_spans(self, text: str) -> TextTokens:
        # each byte of a character stands for that same character
        sizes = [len(character.encode("utf-8", "replace")) for character in text]
        starts = np.repeat(np.arange(len(text), dtype=np.int32), sizes)
        return TextTokens(self.encode_array(text), starts, starts + 1)

    def token_bytes(self, token: int) -> bytes:
        return bytes((token - _FIRST,))

    def content(self) -> dict[str, Any]:
        return {}

    @classmethod
    def restore(cls, content: dict[str, Any]) -> "ByteTokenizer":
        return cls()

    @classmethod
    def learn(cls, texts: Iterable[str], size: int | None) -> "ByteTokenizer":
        assert size is None
        return cls()


class WordTokenizer(NativeTokenizer):
    """One token per space-separated word; words outside the vocabulary are unk."""

    kind = "word"
    reads_spaces = False

    def __init__(self, vocabulary: Sequence[str]) -> None:
        self.vocabulary = tuple(vocabulary)
        self._ids = {word: number for number, word in enumerate(self.vocabulary, _FIRST)}
        if len(self._ids) < len(self.vocabulary):
            raise UserError("this vocabulary contains a word twice")

    @property
    def vocab(self) -> int:
        return _FIRST + len(self.vocabulary)

    def encode_array(self, text: str) -> TokenIds:
        if text:
            ids = [self._ids.get(word, self.unk) for word in text.split(" ")]
        else:
            ids = []
        return np.array(ids, dtype=np.int32)

    def encode_spans(self, text: str) -> TextTokens:
        lengths = np.array([len(word) for word in text.split(" ")] if text else [], dtype=np.int32)
        # a space follows each word but the last
        stops = np.cumsum(lengths + 1, dtype=np.int32) - 1
        return TextTokens(self.encode_array(text), stops - lengths, stops)

    def decode(self, tokens: Iterable[SupportsIndex]) -> str:
        decoder = self.stream()
        return "".join(map(decoder.push, tokens)) + decoder.finish()

    def stream(self) -> StreamDecoder:
        started = False

        def bytes_with_separator(token: int) -> bytes:
            # no space before the first word: special tokens, which have no text, are not counted as one
            nonlocal started
            word = self._decode_token(token)
            separator = b" " if started and word else b""
            started = started or bool(word)
            return separator + word

        return StreamDecoder(bytes_with_separator)

    def token_bytes(self, token: int) -> bytes:
        return self.vocabulary[token - _FIRST].encode("utf-8", "replace")

    def content(self) -> dict[str, Any]:
        return {"words": list(self.vocabulary)}

    @classmethod
    def restore(cls, content: dict[str, Any]) -> "WordTokenizer":
        return cls(content["words"])

    @classmethod
    def learn(cls, texts: Iterable[str], size: int | None) -> "WordTokenizer":
        if size is not None and size < _FIRST:
            raise UserError(f"vocab is {size}, but a vocabulary of words holds 5 special tokens: at least 5")
        counts = Counter(word for text in texts for word in text.split(" ") if word)
        # Descending counts, ties in alphabetical order, so that the order of the texts does not matter.
        # Two sorts of plain values are many times faster than one of pairs, in which no signal would be heard.
        frequent = sorted(word for word, count in counts.items() if count >= _MIN_WORD_COUNT)
        frequent.sort(key=counts.__getitem__, reverse=True)
        return cls(frequent if size is None else frequent[: size - _FIRST])


class BPETokenizer(NativeTokenizer):
    """Byte pair encoding (Sennrich et al. 2016) on bytes as in GPT-2, so that every text round-trips exactly."""

    kind = "bpe"
    # the library encodes the texts of a call in parallel, and needs about 90 bytes for each character of them
    block_characters = 1 << 22

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        # Otherwise a text that contains "<eos>" would be encoded as the special token.
        inner.encode_special_tokens = True
        self._inner = inner
        self._vocab: int = inner.get_vocab_size()
        byte_values = byte_of_character()
        token_texts = {number: name for name, number in inner.get_vocab().items()}
        if sorted(token_texts) != list(range(self._vocab)) or [token_texts[i] for i in range(len(SPECIALS))] != list(
            SPECIALS
        ):
            raise UserError("this byte pair vocabulary does not begin with <pad> <bos> <eos> <unk> <mask>")
        ordinary_ids = range(len(SPECIALS), self._vocab)
        self._pieces = [b""] * len(SPECIALS) + [
            bytes(byte_values[character] for character in token_texts[i]) for i in ordinary_ids
        ]
        # pairs learned from single words have none with a space
        self.reads_spaces = any(len(piece) > 1 and piece.startswith(b" ") for piece in self._pieces)

    @property
    def vocab(self) -> int:
        return self._vocab

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._inner.encode(_replace_surrogates(text)).ids
        return ids

    def encode_array(self, text: str) -> TokenIds:
        return np.asarray(self.encode(text), dtype=np.int32)

    def encode_many(self, texts: Sequence[str]) -> list[TokenIds]:
        # The fast variant does not compute character offsets, which are not needed.
        encodings = self._inner.encode_batch_fast([_replace_surrogates(text) for text in texts])
        return [np.asarray(encoding.ids, dtype=np.int32) for encoding in encodings]

    def encode_spans(self, text: str) -> TextTokens:
        return TextTokens.of_encoding(self._inner.encode(_replace_surrogates(text)))

    def token_bytes(self, token: int) -> bytes:
        return self._pieces[token]

    def content(self) -> dict[str, Any]:
        return {"tokenizers": json.loads(self._inner.to_str())}

    @classmethod
    def restore(cls, content: dict[str, Any]) -> "BPETokenizer":
        inner = read_tokenizer(content["tokenizers"])
        # those that we wrote have neither
        inner.no_truncation()
        inner.no_padding()
        return cls(inner)

    @classmethod
    def learn(cls, texts: Iterable[str], size: int | None) -> "BPETokenizer":
        if size is None or size < _MIN_BPE_VOCAB:
            raise UserError(f"vocab is {size}, but a bpe vocabulary holds 256 bytes and 5 special tokens: at least 261")
        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=list(SPECIALS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        inner.train_from_iterator((_replace_surrogates(text) for text in texts), trainer)
        return cls(inner)


@cache
def byte_of_character() -> dict[str, int]:
    """From GPT-2's printable characters for bytes to the bytes.

    A printable Latin-1 byte maps to itself, the remaining ones to code points from 256 on, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    remaining = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + offset): byte for offset, byte in enumerate(remaining)}


def _code_points(text: str) -> TokenIds:
    # Lone surrogates (half a character, from a terminal in another encoding) are unknown characters, not a crash.
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.int32)


def _replace_surrogates(text: str) -> str:
    # Lone surrogates have no UTF-8; the library would raise an obscure TypeError.
    if text.isascii():
        return text
    return text.encode("utf-8", "replace").decode()
