"""Byte-level byte pair encoding, trained on the run's own text by the `tokenizers` library."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from manyformer.data.tokenizer import SPECIALS, TokenIds, Tokenizer
from manyformer.errors import UserError

_SMALLEST = len(SPECIALS) + 256


class BPETokenizer(Tokenizer):
    """Frequent byte sequences as tokens (Sennrich et al. 2016, on bytes as GPT-2): any text, exactly back."""

    kind = "bpe"

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        # Else a text that happens to hold "<eos>" would turn into the special token.
        inner.encode_special_tokens = True
        self._inner = inner
        self._vocab: int = inner.get_vocab_size()
        unmap = _bytes_of_signs()
        names = {number: name for name, number in inner.get_vocab().items()}
        if sorted(names) != list(range(self._vocab)) or [names[i] for i in range(len(SPECIALS))] != list(SPECIALS):
            raise UserError("this byte pair vocabulary does not begin with <pad> <bos> <eos> <unk> <mask>")
        words = range(len(SPECIALS), self._vocab)
        self._pieces = [b""] * len(SPECIALS) + [bytes(unmap[sign] for sign in names[i]) for i in words]

    @property
    def vocab(self) -> int:
        return self._vocab

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._inner.encode(_valid(text)).ids
        return ids

    def encode_array(self, text: str) -> TokenIds:
        return np.asarray(self.encode(text), dtype=np.int32)

    def encode_many(self, texts: Sequence[str]) -> list[TokenIds]:
        # The fast variant leaves out the character offsets, which nobody asks for.
        done = self._inner.encode_batch_fast([_valid(text) for text in texts])
        return [np.asarray(encoding.ids, dtype=np.int32) for encoding in done]

    def piece(self, token: int) -> bytes:
        return self._pieces[token]

    def content(self) -> dict[str, Any]:
        return {"tokenizers": json.loads(self._inner.to_str())}

    @classmethod
    def restore(cls, content: dict[str, Any]) -> "BPETokenizer":
        text = json.dumps(content["tokenizers"])
        try:
            inner = tokenizers.Tokenizer.from_str(text)
        # The library raises plain Exception.
        except Exception as error:
            raise ValueError(str(error)) from error
        return cls(inner)

    @classmethod
    def learn(cls, texts: Iterable[str], size: int | None) -> "BPETokenizer":
        if size is None or size < _SMALLEST:
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
        inner.train_from_iterator((_valid(text) for text in texts), trainer)
        return cls(inner)


def _valid(text: str) -> str:
    # Lone surrogates have no UTF-8; the library would raise a TypeError about its own insides.
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _bytes_of_signs() -> dict[str, int]:
    # GPT-2's printable stand-ins: a printable Latin-1 byte stands for itself, the others follow from 256 on, in order.
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}
