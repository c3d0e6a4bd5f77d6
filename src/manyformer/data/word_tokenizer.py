"""A tokenizer of whole words, for text that comes divided into them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex

import numpy as np

from manyformer.data.tokenizer import SPECIALS, StreamDecoder, TokenIds, Tokenizer
from manyformer.errors import UserError

_FIRST = len(SPECIALS)
# A word seen once stands for those never seen: it teaches what to make of an unknown one.
_LEAST = 2


class WordTokenizer(Tokenizer):
    """One token a word, words being parted by single spaces; any other word is unk."""

    kind = "word"

    def __init__(self, words: Sequence[str]) -> None:
        self.words = tuple(words)
        self._numbers = {word: number for number, word in enumerate(self.words, _FIRST)}
        if len(self._numbers) < len(self.words):
            raise UserError("this vocabulary holds the same word twice")

    @property
    def vocab(self) -> int:
        return _FIRST + len(self.words)

    def encode_array(self, text: str) -> TokenIds:
        found = [self._numbers.get(word, self.unk) for word in text.split(" ")] if text else []
        return np.array(found, dtype=np.int32)

    def decode(self, tokens: Iterable[SupportsIndex]) -> str:
        decoder = self.stream()
        return "".join(map(decoder.push, tokens)) + decoder.finish()

    def stream(self) -> StreamDecoder:
        begun = False

        def spaced(token: int) -> bytes:
            nonlocal begun
            word = self._bytes_of(token)
            gap, begun = b" " if begun and word else b"", begun or bool(word)
            return gap + word

        return StreamDecoder(spaced)

    def piece(self, token: int) -> bytes:
        return self.words[token - _FIRST].encode("utf-8", "replace")

    def content(self) -> dict[str, Any]:
        return {"words": list(self.words)}

    @classmethod
    def restore(cls, content: dict[str, Any]) -> "WordTokenizer":
        return cls(content["words"])

    @classmethod
    def learn(cls, texts: Iterable[str], size: int | None) -> "WordTokenizer":
        if size is not None and size < _FIRST:
            raise UserError(f"vocab is {size}, but a vocabulary of words holds 5 special tokens: at least 5")
        seen = Counter(word for text in texts for word in text.split(" ") if word)
        # The most frequent first; equally frequent ones in an order that does not depend on that of the texts.
        words = sorted((word for word, count in seen.items() if count >= _LEAST), key=lambda word: (-seen[word], word))
        return cls(words if size is None else words[: size - _FIRST])
