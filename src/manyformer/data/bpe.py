"""Byte-level byte pair encoding, trained on the run's own text by the `tokenizers` library."""

import json
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from manyformer.data.tokenizer import SPECIALS, NativeTokenizer, TextTokens, TokenIds
from manyformer.errors import UserError
from manyformer.libraries.tokenizer_rules import read_tokenizer

_MIN_VOCAB = len(SPECIALS) + 256


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
        if size is None or size < _MIN_VOCAB:
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


def _replace_surrogates(text: str) -> str:
    # Lone surrogates have no UTF-8; the library would raise an obscure TypeError.
    if text.isascii():
        return text
    return text.encode("utf-8", "replace").decode()


@cache
def byte_of_character() -> dict[str, int]:
    """From GPT-2's printable characters for bytes to the bytes.

    A printable Latin-1 byte maps to itself, the remaining ones to code points from 256 on, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    remaining = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + offset): byte for offset, byte in enumerate(remaining)}
