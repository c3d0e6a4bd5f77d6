"""What a tokenizer is: text to numbers and exactly back, five special numbers, a stream that never cuts a character."""

import codecs
import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from manyformer.data.atomic_files import write_text
from manyformer.errors import UserError, nearest

TokenIds = NDArray[np.int32]
SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>", "<mask>")
UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class StreamDecoder:
    """Text pieces as token numbers arrive; a character whose bytes are not all there yet waits for the next token."""

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        self._piece = piece
        self._bytes = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: SupportsIndex) -> str:
        """The text that this token completes, "" where it completes none."""
        return self._bytes.decode(self._piece(int(token)))

    def finish(self) -> str:
        """What is left at the end: a replacement character where the last character is not whole."""
        return self._bytes.decode(b"", final=True)


class Tokenizer(ABC):
    """Text to token numbers and back; numbers below 5 are special and stand for no text."""

    kind: ClassVar[str]
    pad: ClassVar[int] = 0
    bos: ClassVar[int] = 1
    eos: ClassVar[int] = 2
    unk: ClassVar[int] = 3
    mask: ClassVar[int] = 4

    @property
    @abstractmethod
    def vocab(self) -> int:
        """How many numbers there are, the special ones among them."""

    @abstractmethod
    def encode_array(self, text: str) -> TokenIds:
        """The text's token numbers as an array; neither bos nor eos is added."""

    @abstractmethod
    def piece(self, token: int) -> bytes:
        """The bytes (UTF-8) that an ordinary token stands for."""

    @abstractmethod
    def content(self) -> dict[str, Any]:
        """What is saved, as JSON."""

    @classmethod
    @abstractmethod
    def restore(cls, content: dict[str, Any]) -> "Tokenizer":
        """The tokenizer that `content` came from."""

    def encode(self, text: str) -> list[int]:
        """The text's token numbers; neither bos nor eos is added."""
        tokens: list[int] = self.encode_array(text).tolist()
        return tokens

    def encode_many(self, texts: Sequence[str]) -> list[TokenIds]:
        """`encode_array` of each."""
        return [self.encode_array(text) for text in texts]

    def decode(self, tokens: Iterable[SupportsIndex]) -> str:
        """The text of these numbers: special ones give nothing, unk and broken UTF-8 the replacement character."""
        return b"".join(self._bytes_of(int(token)) for token in tokens).decode("utf-8", errors="replace")

    def stream(self) -> StreamDecoder:
        """A decoder for tokens that arrive one by one."""
        return StreamDecoder(self._bytes_of)

    def token(self, number: SupportsIndex) -> str:
        """How one token is shown to people: the special ones by name."""
        index = int(number)
        return SPECIALS[index] if 0 <= index < len(SPECIALS) else self._bytes_of(index).decode("utf-8", "replace")

    def _bytes_of(self, token: int) -> bytes:
        if not 0 <= token < self.vocab:
            raise ValueError(f"no token has the number {token}; this {self.kind} tokenizer knows 0 to {self.vocab - 1}")
        if token == self.unk:
            return UNKNOWN.encode()
        return b"" if token < len(SPECIALS) else self.piece(token)

    @property
    def fingerprint(self) -> str:
        """Equal for tokenizers that do the same."""
        text = json.dumps([self.kind, self.content()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one JSON file, atomically."""
        write_text(Path(path), json.dumps({"kind": self.kind, **self.content()}, ensure_ascii=False, indent=1) + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "Tokenizer":
        """Reads what `save` wrote; UserError names a missing or damaged file."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            return _kind(content.pop("kind")).restore(content)
        except FileNotFoundError:
            raise UserError(f"{path}: there is no tokenizer here") from None
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise UserError(f"{path}: this is not a whole tokenizer file ({error})") from error

    @staticmethod
    def train(kind: str, texts: Iterable[str], size: int | None = None) -> "Tokenizer":
        """A tokenizer of this kind ("char", "byte", "bpe", "word") for these texts; `size` is that of a vocabulary."""
        return _kind(kind).learn(texts, size)

    @classmethod
    @abstractmethod
    def learn(cls, texts: Iterable[str], size: int | None) -> "Tokenizer":
        """A tokenizer of this class for these texts."""


def _kind(name: str) -> type[Tokenizer]:
    # Imported here: these modules need the class above.
    from manyformer.data.bpe import BPETokenizer
    from manyformer.data.characters import ByteTokenizer, CharTokenizer
    from manyformer.data.pixel_tokenizer import PixelTokenizer
    from manyformer.data.word_tokenizer import WordTokenizer

    kinds: dict[str, type[Tokenizer]] = {
        kind.kind: kind for kind in (CharTokenizer, ByteTokenizer, BPETokenizer, WordTokenizer, PixelTokenizer)
    }
    if name not in kinds:
        raise UserError(f"there is no tokenizer {name!r}; {nearest(str(name), kinds)}")
    return kinds[name]
