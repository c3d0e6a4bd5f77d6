"""A word-level tokenizer for text whose words are separated by single spaces."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex

import numpy as np

from manyformer.data.tokenizer import SPECIALS, NativeTokenizer, StreamDecoder, TextTokens, TokenIds
from manyformer.errors import UserError

_FIRST = len(SPECIALS)
# Words that occur once become unk, so that the embedding of unk is trained.
_MIN_COUNT = 2


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
        frequent = sorted(word for word, count in counts.items() if count >= _MIN_COUNT)
        frequent.sort(key=counts.__getitem__, reverse=True)
        return cls(frequent if size is None else frequent[: size - _FIRST])
