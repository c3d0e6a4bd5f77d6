"""Tokenizers of folders without a tokenizer.json: word pieces, byte pairs with merges, and models of sentencepiece.

Each is read as the content of an equal tokenizer.json."""

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from manyformer.data.tokenizer_kinds import MAX_TOKENIZER_BYTES
from manyformer.errors import UserError
from manyformer.files.json_records import DamagedFile, read_bounded, read_json
from manyformer.libraries.library_calls import RefusedByLibrary, load_auto_tokenizer

BERT_SPECIAL_TOKENS = {"unk": "[UNK]", "pad": "[PAD]", "bos": "[CLS]", "eos": "[SEP]", "mask": "[MASK]"}
"""The special tokens of BERT by our kinds."""

SETTINGS = "tokenizer_config.json"

PIECE_IDS = "vocab.json"
TARGET_PIECE_IDS = "target_vocab.json"

MARIAN_SPECIAL_TOKENS = {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"}
"""The special tokens of Marian by our kinds."""

UNIGRAM = 1
NORMAL = 1
USER_DEFINED = 4
"""Numbers in models of sentencepiece: their algorithm, and the kinds of pieces that texts are divided into."""

ABSENT_SCORE = -1e6
"""The score of pieces of the other language, which divide a text only where nothing else does."""

SPACE = "▁"


def read_word_pieces(file: Path, names: Mapping[str, str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The content of the tokenizer.json that is equal to a vocabulary of word pieces, one in a line.

    `names` are its special tokens by our kinds, and `settings` those of tokenizer_config.json. Raises DamagedFile for a
    file that is no text, or lacks a special token that surrounds a text or stands for unknown words."""
    try:
        text = read_bounded(file, MAX_TOKENIZER_BYTES).decode().replace("\r\n", "\n")
    except UnicodeDecodeError:
        raise DamagedFile(f"{file} is damaged: it is no text in UTF-8") from None
    # not splitlines, which divides pieces at separators that are pieces
    vocabulary = {piece: number for number, piece in enumerate(text.removesuffix("\n").split("\n"))}
    first, last, unknown = (names[kind] for kind in ("bos", "eos", "unk"))
    for token in (first, last, unknown):
        if token not in vocabulary:
            raise DamagedFile(f"{file} is damaged: it lacks the special token {token!r:.40}")
    inner = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token=unknown))
    inner.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.get("tokenize_chinese_chars") is not False,
        strip_accents=settings.get("strip_accents") if isinstance(settings.get("strip_accents"), bool) else None,
        lowercase=settings.get("do_lower_case") is not False,
    )
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    inner.post_processor = processors.BertProcessing((last, vocabulary[last]), (first, vocabulary[first]))
    inner.add_special_tokens([token for token in names.values() if token in vocabulary])
    content: dict[str, Any] = json.loads(inner.to_str())
    return content


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
    if "entencepiece" in str(error):
        return "sentencepiece"
    return "protobuf"


def _names_code(file: Path) -> bool:
    if file.exists():
        settings = read_json(file, "settings of a tokenizer")
    else:
        settings = {}
    return isinstance(settings, dict) and bool(settings.get("auto_map"))


class PieceModel(NamedTuple):
    """What a model of sentencepiece says: the log probabilities of its pieces, and its table of characters."""

    scores: dict[str, float]
    characters: bytes


def read_marian_tokenizers(models_of_pieces: Sequence[Path], names: Mapping[str, str]) -> list[dict[str, Any]]:
    """The contents of the tokenizer.json of sources and of that of targets, which have their own ids or shared ones.

    `models_of_pieces` are the models of sentencepiece of both, and `names` the special tokens by our kinds. Pieces that
    the vocabulary lacks, which have no embedding, are not used. Raises UserError without the packages that read the
    models, and DamagedFile for files that are none."""
    folder = models_of_pieces[0].parent
    vocabularies = [PIECE_IDS, TARGET_PIECE_IDS if (folder / TARGET_PIECE_IDS).exists() else PIECE_IDS]
    return [
        _tokenizer_content(_read_pieces(file), _read_vocabulary(folder / vocabulary, names), names)
        for file, vocabulary in zip(models_of_pieces, vocabularies, strict=True)
    ]


def _tokenizer_content(pieces: PieceModel, vocabulary: list[str], names: Mapping[str, str]) -> dict[str, Any]:
    """The content of the tokenizer.json of one language; codes such as >>fra<< name that of the target."""
    scored = [(piece, pieces.scores.get(piece, ABSENT_SCORE)) for piece in vocabulary]
    inner = tokenizers.Tokenizer(models.Unigram(scored, vocabulary.index(names["unk"]), byte_fallback=False))
    spaces = [normalizers.Strip(left=False, right=True), normalizers.Replace(tokenizers.Regex(" {2,}"), SPACE)]
    if pieces.characters:
        table = [normalizers.Precompiled(pieces.characters)]
    else:
        table = []
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
        raise UserError(f"{file} is missing, which has the token ids of source.spm and target.spm")
    content = read_json(file, "a vocabulary", max_bytes=MAX_TOKENIZER_BYTES)
    if isinstance(content, dict):
        ids = list(content.values())
    else:
        ids = []
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
