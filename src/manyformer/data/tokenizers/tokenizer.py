"""The tokenizer interface: text to token ids and back, special tokens, incremental decoding; none where no text is."""

import codecs
import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn, SupportsIndex, final

import numpy as np
from numpy.typing import NDArray

from manyformer.base.errors import UserError
from manyformer.base.files.atomic_files import atomic_write_text
from manyformer.base.files.json_text import json_text

TokenIds = NDArray[np.int32]
SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>", "<mask>")
UNKNOWN_TEXT = "\N{REPLACEMENT CHARACTER}"


class TextTokens(NamedTuple):
    """The token ids of a text; token i stands for the characters `starts[i]` to `stops[i]` - 1 of it."""

    ids: TokenIds
    starts: TokenIds
    stops: TokenIds

    @classmethod
    def of_encoding(cls, encoding: Any) -> "TextTokens":
        """The tokens of an encoding of the `tokenizers` library."""
        offsets = np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2)
        return cls(np.array(encoding.ids, dtype=np.int32), offsets[:, 0], offsets[:, 1])


class StreamDecoder:
    """Incremental decoder from token ids to text, which holds back the bytes of an incomplete character."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        # one character may come in several tokens, each of which alone would become a replacement character
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: SupportsIndex) -> str:
        """The text that this token completes, "" where it completes none."""
        return self._utf8.decode(self._token_bytes(int(token)))

    def finish(self) -> str:
        """The remaining text at the end: a replacement character if the last character is incomplete."""
        return self._utf8.decode(b"", final=True)


class Tokenizer(ABC):
    """Maps text to token ids and back. The ids of its special tokens are its own: no other part assumes them."""

    kind: ClassVar[str]
    pad: int
    bos: int
    eos: int
    unk: int
    mask: int
    stop_ids: tuple[int, ...]
    """The tokens that end a generated text."""
    prepends_bos: bool = True
    """Whether a text that a model reads begins with `bos`."""
    begins_prompts: bool = False
    """Whether a prompt does, too, and is not taken for a piece from the middle of a text."""
    reads_spaces: bool = True
    """Whether it knows words with the spaces between them, as running text has them."""
    pair_separators: int = 1
    """The number of `eos` between two texts in one row."""
    block_characters: int = 1 << 20
    """The characters of the texts that `encode_many` should get in one call."""

    @property
    @abstractmethod
    def vocab(self) -> int:
        """The size of the vocabulary, special tokens included."""

    @cached_property
    @abstractmethod
    def ordinary_ids(self) -> TokenIds:
        """The ids that text is made of, sorted: neither special tokens nor placeholders that no text has."""

    @cached_property
    def is_ordinary(self) -> NDArray[np.bool_]:
        """For each id whether it is one of `ordinary_ids`."""
        # a table, since masking looks up the ids of whole batches
        flags = np.zeros(self.vocab, dtype=np.bool_)
        flags[self.ordinary_ids] = True
        return flags

    def required_mask(self, purpose: str) -> int:
        """The id of the mask token. Raises UserError where the tokenizer has none; `purpose` is what needs it."""
        # a tokenizer without a mask token has the id of another special token in its place
        if self.mask in (self.pad, self.bos, self.eos, self.unk, *self.stop_ids):
            raise UserError(
                f"the tokenizer has no mask token, which {purpose} needs; take a tokenizer with one, such as a BERT's"
            )
        return self.mask

    @abstractmethod
    def encode_array(self, text: str) -> TokenIds:
        """The token ids of the text as an array, without bos and eos."""

    def encode_spans(self, text: str) -> TextTokens:
        """`encode_array` of the text with the characters that each token stands for."""
        raise NotImplementedError(f"{type(self).__name__} reads no text")

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
        # bytes are joined before they are decoded: a character may be divided between two tokens
        return b"".join(self._decode_token(int(token)) for token in tokens).decode("utf-8", errors="replace")

    def stream(self) -> StreamDecoder:
        """An incremental decoder for tokens that are generated one by one."""
        return StreamDecoder(self._decode_token)

    def token(self, number: SupportsIndex) -> str:
        """A token as displayed text; special tokens by their names."""
        return self._decode_token(int(number)).decode("utf-8", "replace")

    def _decode_token(self, token: int) -> bytes:
        if not 0 <= token < self.vocab:
            raise ValueError(f"token id {token} is out of range; this {self.kind} tokenizer has 0 to {self.vocab - 1}")
        return self.token_bytes(token)

    @property
    def fingerprint(self) -> str:
        """A hash that is equal for equal tokenizers."""
        text = json_text([self.kind, self.content()], sort_keys=True, ensure_ascii=True)
        # files of earlier versions hold this hash: its length and the order of keys must not change
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tokenizer as one JSON file, atomically."""
        atomic_write_text(Path(path), json_text({"kind": self.kind, **self.content()}, indent=1) + "\n")

    @classmethod
    @abstractmethod
    def learn(cls, texts: Iterable[str], size: int | None) -> "Tokenizer":
        """Train a tokenizer of this class on `texts` with a vocabulary of `size`."""


class NativeTokenizer(Tokenizer):
    """A tokenizer of this library, whose first ids are those of `SPECIALS`; the others are ordinary tokens."""

    pad = 0
    bos = 1
    eos = 2
    unk = 3
    mask = 4
    stop_ids = (2,)

    @cached_property
    def ordinary_ids(self) -> TokenIds:
        return np.arange(len(SPECIALS), self.vocab, dtype=np.int32)

    def token(self, number: SupportsIndex) -> str:
        index = int(number)
        if 0 <= index < len(SPECIALS):
            return SPECIALS[index]
        return super().token(index)

    def _decode_token(self, token: int) -> bytes:
        if token == self.unk:
            return UNKNOWN_TEXT.encode()
        if 0 <= token < len(SPECIALS):
            return b""
        return super()._decode_token(token)


@final
class NoTokenizer(NativeTokenizer):
    """The tokenizer of data without tokens, such as observations of an environment. Raises UserError for any text."""

    kind = "none"

    @property
    def vocab(self) -> int:
        return 0

    def encode_array(self, text: str) -> NoReturn:
        raise UserError("this model reads no text: it was trained on data without tokens")

    def token_bytes(self, token: int) -> NoReturn:
        raise UserError("this model writes no text: it was trained on data without tokens")

    def content(self) -> dict[str, Any]:
        return {}

    @classmethod
    def restore(cls, content: dict[str, Any]) -> "NoTokenizer":
        return cls()

    @classmethod
    def learn(cls, texts: Iterable[str], size: int | None) -> NoReturn:
        raise UserError("the tokenizer 'none' is for data without tokens; it cannot be learned from text")
