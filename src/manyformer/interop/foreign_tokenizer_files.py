"""The tokenizer in the folder of a foreign model."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from manyformer.data.foreign_tokenizer import ForeignTokenizer
from manyformer.data.tokenizer_kinds import MAX_TOKENIZER_BYTES
from manyformer.files.json_records import DamagedFile, read_json
from manyformer.interop.foreign_config import CONFIG, GENERATION

TOKENIZER, VOCABULARY = "tokenizer.json", "vocab.txt"
PIECE_MODELS = ("source.spm", "target.spm")
"""The models of sentencepiece of a Marian, for each language."""

OLDER_FILES = (VOCABULARY, "merges.txt", "spiece.model", "sentencepiece.bpe.model", "spm.model", "tokenizer.model")
"""Files by which a tokenizer is known that has no tokenizer.json."""

SPECIAL_TOKEN_FILES = ("tokenizer_config.json", "special_tokens_map.json")
KINDS = {"bos": "bos", "eos": "eos", "cls": "bos", "sep": "eos", "pad": "pad", "unk": "unk", "mask": "mask"}
"""From the kinds of special tokens to ours, the first of which counts: BERT has cls and sep in place of bos and eos."""


def read_foreign_tokenizer(folder: Path) -> ForeignTokenizer | None:
    """The tokenizer that a tokenizer.json or, in its place, the files of an older one describe; None without any.

    Special tokens are those of tokenizer_config.json and special_tokens_map.json, and what ends a text is what
    generation_config.json or config.json says. Raises DamagedFile for a file that is no tokenizer."""
    file = next((folder / name for name in (TOKENIZER, *OLDER_FILES) if (folder / name).exists()), None)
    if file is None:
        return None
    names = _special_tokens([_read_object(folder / name) for name in SPECIAL_TOKEN_FILES])
    if file.name == TOKENIZER:
        content = read_json(file, "a tokenizer", max_bytes=MAX_TOKENIZER_BYTES)
    elif file.name == VOCABULARY:
        from manyformer.interop.older_tokenizers import BERT_SPECIAL_TOKENS, read_word_pieces

        names = {**BERT_SPECIAL_TOKENS, **names}
        content = read_word_pieces(file, names, _read_object(folder / SPECIAL_TOKEN_FILES[0]))
    else:
        from manyformer.interop.older_tokenizers import convert_tokenizer

        content, special_tokens = convert_tokenizer(file)
        names = {**_special_tokens([special_tokens]), **names}
    stop_ids = _read_stop_ids(folder)
    return _read_content(file, content, names, stop_ids)


def read_foreign_tokenizers(folder: Path) -> tuple[ForeignTokenizer, ForeignTokenizer] | None:
    """The tokenizers of sources and of targets: one for both, or those of the two languages of a Marian."""
    piece_files = [folder / name for name in PIECE_MODELS]
    if (folder / TOKENIZER).exists() or not all(file.exists() for file in piece_files):
        tokenizer = read_foreign_tokenizer(folder)
        return None if tokenizer is None else (tokenizer, tokenizer)
    from manyformer.interop.older_tokenizers import MARIAN_SPECIAL_TOKENS, read_marian_tokenizers

    names = {**MARIAN_SPECIAL_TOKENS, **_special_tokens([_read_object(folder / name) for name in SPECIAL_TOKEN_FILES])}
    stop_ids = _read_stop_ids(folder)
    source, target = (
        _read_content(folder / file, content, names, stop_ids)
        for file, content in zip(PIECE_MODELS, read_marian_tokenizers(piece_files, names), strict=True)
    )
    return source, target


def _read_content(file: Path, content: Any, names: Mapping[str, str], stop_ids: list[int]) -> ForeignTokenizer:
    try:
        if not isinstance(content, dict):
            raise ValueError("it holds no object")
        return ForeignTokenizer.of_files(content, names, stop_ids)
    except ValueError as error:
        raise DamagedFile(f"{file} is no tokenizer that can be read: {error}") from None


def _read_stop_ids(folder: Path) -> list[int]:
    """What generation_config.json or, where that says nothing, config.json says that ends a text."""
    return next(filter(None, (_stop_ids(_read_object(folder / name)) for name in (GENERATION, CONFIG))), [])


def _special_tokens(files: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The special tokens by their kinds, those of the first files first."""
    names: dict[str, str] = {}
    for settings in files:
        for their_kind, kind in KINDS.items():
            token = settings.get(f"{their_kind}_token")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                names.setdefault(kind, token)
    return names


def _read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where the file is missing."""
    content = read_json(file, "settings of a tokenizer") if file.exists() else {}
    return content if isinstance(content, dict) else {}


def _stop_ids(settings: dict[str, Any]) -> list[int]:
    value = settings.get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    return [token for token in ids if type(token) is int]
