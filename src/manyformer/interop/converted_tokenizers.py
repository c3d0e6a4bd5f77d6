"""Tokenizers in files that only `transformers` reads: byte pairs with their merges, and models of sentencepiece."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from manyformer.data.tokenizer_kinds import MAX_TOKENIZER_BYTES
from manyformer.errors import UserError
from manyformer.files.json_records import DamagedFile, read_json
from manyformer.libraries.hub_libraries import load_auto_tokenizer
from manyformer.libraries.library_calls import RefusedByLibrary

CONVERTED_FILES = (
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "spm.model",
    "tokenizer.model",
)
"""Files by which a tokenizer is known that has no tokenizer.json."""


SETTINGS = "tokenizer_config.json"


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
        theirs = load_auto_tokenizer(file.parent)
    except ImportError as error:
        raise missing_package(file, _package_of(error)) from None
    except RefusedByLibrary as error:
        if _names_code(file.with_name(SETTINGS)):
            raise UserError(
                f"{file.with_name(SETTINGS)}: auto_map names Python code of the folder as its tokenizer, and no code "
                "of a folder is run; save the tokenizer with a tokenizer.json"
            ) from None
        raise DamagedFile(f"{file} cannot be read as a tokenizer: {error}") from None
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


def _package_of(error: ImportError) -> str:
    """The package that an import or a class of `transformers` misses."""
    if error.name == "transformers":
        return "transformers"
    return "sentencepiece" if "entencepiece" in str(error) else "protobuf"


def _names_code(file: Path) -> bool:
    settings = read_json(file, "settings of a tokenizer") if file.exists() else {}
    return isinstance(settings, dict) and bool(settings.get("auto_map"))
