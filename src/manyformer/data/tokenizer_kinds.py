"""Tokenizers by the names of their kinds: trained from texts, or loaded from a file."""

import os
from collections.abc import Iterable
from pathlib import Path

from manyformer.data.bpe import BPETokenizer
from manyformer.data.characters import ByteTokenizer, CharTokenizer
from manyformer.data.foreign_tokenizer import ForeignTokenizer
from manyformer.data.log_mel import LogMelFrontEnd
from manyformer.data.pixel_tokenizer import PixelTokenizer
from manyformer.data.tokenizer import NoTokenizer, Tokenizer
from manyformer.data.word_tokenizer import WordTokenizer
from manyformer.errors import UserError, suggest_names
from manyformer.files.json_records import DamagedFile, read_json

MAX_TOKENIZER_BYTES = 1 << 29
"""The largest file of a tokenizer or of labels that is read."""

TOKENIZERS: dict[str, type[Tokenizer]] = {
    tokenizer.kind: tokenizer
    for tokenizer in (
        *(CharTokenizer, ByteTokenizer, BPETokenizer, WordTokenizer),
        *(PixelTokenizer, LogMelFrontEnd, NoTokenizer, ForeignTokenizer),
    )
}


def train_tokenizer(kind: str, texts: Iterable[str], size: int | None = None) -> Tokenizer:
    """Train a tokenizer of this kind ("char", "byte", "bpe", "word") on `texts`; `size` is the vocabulary size."""
    return _tokenizer_class(kind).learn(texts, size)


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Load what `Tokenizer.save` wrote. Raises DamagedFile for a missing or damaged file."""
    content = read_json(Path(path), "a tokenizer", max_bytes=MAX_TOKENIZER_BYTES)
    try:
        return _tokenizer_class(content.pop("kind")).restore(content)
    except (ValueError, KeyError, AttributeError, TypeError, OverflowError) as error:
        raise DamagedFile(f"{path} is damaged: it is not a complete tokenizer ({error})") from error


def _tokenizer_class(kind: str) -> type[Tokenizer]:
    if kind not in TOKENIZERS:
        raise UserError(f"there is no tokenizer {kind!r}; {suggest_names(str(kind), TOKENIZERS)}")
    return TOKENIZERS[kind]
