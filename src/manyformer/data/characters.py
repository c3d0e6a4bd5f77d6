"""Character and byte tokenizers: one token per character or per byte."""

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np

from manyformer.data.tokenizer import SPECIALS, NativeTokenizer, TextTokens, TokenIds
from manyformer.errors import UserError

_FIRST = len(SPECIALS)


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


def _code_points(text: str) -> TokenIds:
    # Lone surrogates (half a character, from a terminal in another encoding) are unknown characters, not a crash.
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.int32)
