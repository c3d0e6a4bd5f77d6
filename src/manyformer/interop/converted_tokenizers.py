"""Tokenizers in files that only `transformers` reads: byte pairs with their merges, and models of sentencepiece."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from manyformer.data.tokenizer_kinds import MAX_TOKENIZER_BYTES
from manyformer.errors import UserError
from manyformer.files.json_records import DamagedFile

CONVERTED_FILES = (
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "spm.model",
    "tokenizer.model",
)
"""Files by which a tokenizer is known that has no tokenizer.json."""


class ConvertedTokenizer(NamedTuple):
    """The content of an equal tokenizer.json, and the special tokens by the names that `transformers` gives them."""

    content: dict[str, Any]
    special_tokens: dict[str, str]


def convert_tokenizer(file: Path) -> ConvertedTokenizer:
    """The tokenizer in the folder of `file`, converted by `transformers`, which runs no code of that folder.

    Raises UserError without the packages that read it, and for one that has no equal; DamagedFile for one that cannot
    be read."""
    if file.stat().st_size > MAX_TOKENIZER_BYTES:
        raise DamagedFile(f"{file} is damaged: it has more than {MAX_TOKENIZER_BYTES:,} bytes")
    try:
        import transformers
    except ImportError:
        raise missing_package(file, "transformers") from None
    try:
        with _quiet():
            theirs = transformers.AutoTokenizer.from_pretrained(file.parent, local_files_only=True)
    except ImportError as error:
        raise missing_package(file, "sentencepiece" if "entencepiece" in str(error) else "protobuf") from None
    # the classes raise whatever their parsers do
    except Exception as error:
        raise DamagedFile(f"{file} cannot be read as a tokenizer: {' '.join(str(error).split())[:300]}") from None
    inner = getattr(theirs, "backend_tokenizer", None)
    if inner is None:
        raise UserError(f"{file} is read by {type(theirs).__name__}, which has no equal tokenizer.json")
    names = {name: str(token) for name, token in theirs.special_tokens_map.items() if isinstance(token, str)}
    return ConvertedTokenizer(json.loads(inner.to_str()), names)


def missing_package(file: Path, package: str) -> UserError:
    """The error for a tokenizer that only a package reads which is not installed."""
    return UserError(
        f"{file} is a tokenizer without a tokenizer.json, and the package {package} reads it: "
        f"pip install 'manyformer[hf]' {package}"
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's warnings about files that a folder may lack."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
