"""Tokenizers by the names of their kinds: trained from texts, or loaded from a file."""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from manyformer.data.bpe import BPETokenizer
from manyformer.data.characters import ByteTokenizer, CharTokenizer
from manyformer.data.pixel_tokenizer import PixelTokenizer
from manyformer.data.tokenizer import Tokenizer
from manyformer.data.word_tokenizer import WordTokenizer
from manyformer.errors import UserError, suggest_names

TOKENIZERS: dict[str, type[Tokenizer]] = {
    tokenizer.kind: tokenizer
    for tokenizer in (CharTokenizer, ByteTokenizer, BPETokenizer, WordTokenizer, PixelTokenizer)
}


def train_tokenizer(kind: str, texts: Iterable[str], size: int | None = None) -> Tokenizer:
    """Train a tokenizer of this kind ("char", "byte", "bpe", "word") on `texts`; `size` is the vocabulary size."""
    return _tokenizer_class(kind).learn(texts, size)


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Load what `Tokenizer.save` wrote. Raises UserError for a missing or damaged file."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        return _tokenizer_class(content.pop("kind")).restore(content)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no tokenizer here") from None
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{path}: this file is not a complete tokenizer ({error})") from error


def _tokenizer_class(kind: str) -> type[Tokenizer]:
    if kind not in TOKENIZERS:
        raise UserError(f"there is no tokenizer {kind!r}; {suggest_names(str(kind), TOKENIZERS)}")
    return TOKENIZERS[kind]
