"""The tokenizer interface: text to token ids and back, five special tokens, and incremental decoding."""

import codecs
import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from manyformer.files.atomic_files import atomic_write_text
from manyformer.files.json_text import json_text

TokenIds = NDArray[np.int32]
SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>", "<mask>")
UNKNOWN_TEXT = "\N{REPLACEMENT CHARACTER}"


class StreamDecoder:
    """Incremental decoder from token ids to text, which holds back the bytes of an incomplete character."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: SupportsIndex) -> str:
        """The text that this token completes, "" where it completes none."""
        return self._utf8.decode(self._token_bytes(int(token)))

    def finish(self) -> str:
        """The remaining text at the end: a replacement character if the last character is incomplete."""
        return self._utf8.decode(b"", final=True)


class Tokenizer(ABC):
    """Maps text to token ids and back; ids below 5 are special tokens without text."""

    kind: ClassVar[str]
    pad: int = 0
    bos: int = 1
    eos: int = 2
    unk: int = 3
    mask: int = 4
    stop_ids: tuple[int, ...] = (2,)
    """The tokens that end a generated text."""
    prepends_bos: bool = True
    """Whether a text that a model reads begins with `bos`."""
    pair_separators: int = 1
    """The number of `eos` between two texts in one row."""
    block_characters: int = 1 << 20
    """The characters of the texts that `encode_many` should get in one call."""

    @property
    @abstractmethod
    def vocab(self) -> int:
        """The size of the vocabulary, special tokens included."""

    @abstractmethod
    def encode_array(self, text: str) -> TokenIds:
        """The token ids of the text as an array, without bos and eos."""

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes of an ordinary token."""

    @abstractmethod
    def content(self) -> dict[str, Any]:
        """The tokenizer's parameters as values that JSON can hold."""

    @classmethod
    @abstractmethod
    def restore(cls, content: dict[str, Any]) -> "Tokenizer":
        """The tokenizer whose `content()` is `content`."""

    def encode(self, text: str) -> list[int]:
        """The token ids of the text, without bos and eos."""
        tokens: list[int] = self.encode_array(text).tolist()
        return tokens

    def encode_many(self, texts: Sequence[str]) -> list[TokenIds]:
        """`encode_array` of each text."""
        return [self.encode_array(text) for text in texts]

    def decode(self, tokens: Iterable[SupportsIndex]) -> str:
        """The text of these token ids; special tokens have no text, unk and invalid UTF-8 give U+FFFD."""
        return b"".join(self._decode_token(int(token)) for token in tokens).decode("utf-8", errors="replace")

    def stream(self) -> StreamDecoder:
        """An incremental decoder for tokens that are generated one by one."""
        return StreamDecoder(self._decode_token)

    def token(self, number: SupportsIndex) -> str:
        """A token as displayed text; special tokens by their names."""
        index = int(number)
        return SPECIALS[index] if 0 <= index < len(SPECIALS) else self._decode_token(index).decode("utf-8", "replace")

    def _decode_token(self, token: int) -> bytes:
        if not 0 <= token < self.vocab:
            raise ValueError(f"token id {token} is out of range; this {self.kind} tokenizer has 0 to {self.vocab - 1}")
        if token == self.unk:
            return UNKNOWN_TEXT.encode()
        return b"" if token < len(SPECIALS) else self.token_bytes(token)

    @property
    def fingerprint(self) -> str:
        """A hash that is equal for equal tokenizers."""
        text = json_text([self.kind, self.content()], sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tokenizer as one JSON file, atomically."""
        atomic_write_text(Path(path), json_text({"kind": self.kind, **self.content()}, indent=1) + "\n")

    @classmethod
    @abstractmethod
    def learn(cls, texts: Iterable[str], size: int | None) -> "Tokenizer":
        """Train a tokenizer of this class on `texts` with a vocabulary of `size`."""
