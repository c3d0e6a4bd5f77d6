"""The tokenizers of a Marian: a model of sentencepiece for each language, and the token ids of their pieces."""

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from manyformer.data.tokenizer_kinds import MAX_TOKENIZER_BYTES
from manyformer.errors import UserError
from manyformer.files.json_records import DamagedFile, read_bounded, read_json
from manyformer.interop.converted_tokenizers import missing_package

SOURCE_PIECES, TARGET_PIECES = "source.spm", "target.spm"
VOCABULARY, TARGET_VOCABULARY = "vocab.json", "target_vocab.json"

MARIAN_SPECIAL_TOKENS = {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"}
"""The special tokens of Marian by our kinds."""

UNIGRAM, NORMAL, USER_DEFINED = 1, 1, 4
"""Numbers in models of sentencepiece: their algorithm, and the kinds of pieces that texts are divided into."""

ABSENT_SCORE = -1e6
"""The score of pieces of the other language, which divide a text only where nothing else does."""

SPACE = "▁"


class PieceModel(NamedTuple):
    """What a model of sentencepiece says: the log probabilities of its pieces, and its table of characters."""

    scores: dict[str, float]
    characters: bytes


def is_marian_tokenizer(folder: Path) -> bool:
    """Whether a folder has the two models of sentencepiece of a Marian."""
    return (folder / SOURCE_PIECES).exists() and (folder / TARGET_PIECES).exists()


def read_marian_tokenizers(folder: Path, names: Mapping[str, str]) -> list[dict[str, Any]]:
    """The contents of the tokenizer.json of sources and of that of targets, which have their own ids or shared ones.

    `names` are the special tokens by our kinds. Pieces that the vocabulary lacks, which have no embedding, are not
    used. Raises UserError without the packages that read the models, and DamagedFile for files that are none."""
    vocabularies = [VOCABULARY, TARGET_VOCABULARY if (folder / TARGET_VOCABULARY).exists() else VOCABULARY]
    return [
        _tokenizer_content(_read_pieces(folder / pieces), _read_vocabulary(folder / vocabulary, names), names)
        for pieces, vocabulary in zip((SOURCE_PIECES, TARGET_PIECES), vocabularies, strict=True)
    ]


def _tokenizer_content(pieces: PieceModel, vocabulary: list[str], names: Mapping[str, str]) -> dict[str, Any]:
    """The content of the tokenizer.json of one language; codes such as >>fra<< name that of the target."""
    scored = [(piece, pieces.scores.get(piece, ABSENT_SCORE)) for piece in vocabulary]
    inner = tokenizers.Tokenizer(models.Unigram(scored, vocabulary.index(names["unk"]), byte_fallback=False))
    spaces = [normalizers.Strip(left=False, right=True), normalizers.Replace(tokenizers.Regex(" {2,}"), SPACE)]
    table = [normalizers.Precompiled(pieces.characters)] if pieces.characters else []
    inner.normalizer = normalizers.Sequence([*table, *spaces])
    inner.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always")
    inner.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="always")
    eos = names["eos"]
    inner.post_processor = processors.TemplateProcessing(
        single=f"$A {eos}", pair=f"$A $B {eos}", special_tokens=[(eos, vocabulary.index(eos))]
    )
    inner.add_special_tokens([names[kind] for kind in MARIAN_SPECIAL_TOKENS])
    codes = [piece for piece in vocabulary if piece.startswith(">>") and piece.endswith("<<")]
    inner.add_tokens([tokenizers.AddedToken(code, normalized=False) for code in codes])
    content: dict[str, Any] = json.loads(inner.to_str())
    return content


def _read_vocabulary(file: Path, names: Mapping[str, str]) -> list[str]:
    """The pieces in the order of their ids, which must be those from 0 on."""
    if not file.exists():
        raise UserError(f"{file} is missing, which has the token ids of {SOURCE_PIECES} and {TARGET_PIECES}")
    content = read_json(file, "a vocabulary", max_bytes=MAX_TOKENIZER_BYTES)
    ids = list(content.values()) if isinstance(content, dict) else []
    if not ids or any(type(token) is not int for token in ids) or sorted(ids) != list(range(len(ids))):
        raise DamagedFile(f"{file} is damaged: it must give each piece an id, from 0 on")
    vocabulary = sorted(content, key=content.__getitem__)
    for kind in MARIAN_SPECIAL_TOKENS:
        if names[kind] not in content:
            raise DamagedFile(f"{file} is damaged: it lacks the special token {names[kind]!r:.40}")
    return vocabulary


def _read_pieces(file: Path) -> PieceModel:
    """The pieces in a model of sentencepiece."""
    content = read_bounded(file, MAX_TOKENIZER_BYTES)
    try:
        messages, records = map(import_module, ("google.protobuf.message", "sentencepiece.sentencepiece_model_pb2"))
    except ImportError as error:
        raise missing_package(file, "protobuf" if "google" in str(error) else "sentencepiece") from None
    model = records.ModelProto()
    try:
        model.ParseFromString(content)
    except messages.DecodeError as error:
        raise DamagedFile(f"{file} is no model of sentencepiece: {error}") from None
    if model.trainer_spec.model_type != UNIGRAM or not model.pieces:
        raise UserError(f"{file} divides texts by another algorithm than unigrams, which those of Marian have")
    scores = {piece.piece: float(piece.score) for piece in model.pieces if piece.type in (NORMAL, USER_DEFINED)}
    return PieceModel(scores, model.normalizer_spec.precompiled_charsmap)
