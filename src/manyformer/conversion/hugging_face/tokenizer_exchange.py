"""Tokenizers of Hugging Face: reading those of a folder, older kinds too, and writing ours for `AutoTokenizer`.

A folder without a tokenizer.json has word pieces, byte pairs with merges or models of sentencepiece; each is read as
the content of an equal tokenizer.json."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, WordLevel

from manyformer.base.errors import UserError
from manyformer.base.files.atomic_files import atomic_write_text
from manyformer.base.files.json_records import DamagedFile, read_bounded, read_json
from manyformer.base.files.json_text import json_text
from manyformer.base.libraries import RefusedByLibrary, load_auto_tokenizer
from manyformer.base.libraries.tokenizer_rules import read_tokenizer
from manyformer.conversion.hugging_face.hf_folder import CONFIG, GENERATION
from manyformer.data.tokenizers.foreign_tokenizer import ForeignTokenizer, SpecialIds
from manyformer.data.tokenizers.native_tokenizers import BPETokenizer, ByteTokenizer, CharTokenizer, byte_of_character
from manyformer.data.tokenizers.saved_tokenizers import MAX_TOKENIZER_BYTES
from manyformer.data.tokenizers.tokenizer import SPECIALS, Tokenizer

if TYPE_CHECKING:
    from manyformer.conversion.hugging_face.exported_config import AutoClass

TOKENIZER = "tokenizer.json"
VOCABULARY = "vocab.txt"
PIECE_MODELS = ("source.spm", "target.spm")
"""The models of sentencepiece of a Marian, for each language."""

OLDER_FILES = (VOCABULARY, "merges.txt", "spiece.model", "sentencepiece.bpe.model", "spm.model", "tokenizer.model")
"""Files by which a tokenizer is known that has no tokenizer.json."""

SETTINGS = "tokenizer_config.json"
SPECIAL_TOKEN_FILES = (SETTINGS, "special_tokens_map.json")
KINDS = {"bos": "bos", "eos": "eos", "cls": "bos", "sep": "eos", "pad": "pad", "unk": "unk", "mask": "mask"}
"""From the kinds of special tokens to ours, the first of which counts: BERT has cls and sep in place of bos and eos."""


def read_hf_tokenizer(folder: Path) -> ForeignTokenizer | None:
    """The tokenizer that a tokenizer.json or, in its place, the files of an older one describe; None without any.

    Special tokens are those of tokenizer_config.json and special_tokens_map.json, and what ends a text is what
    generation_config.json or config.json says. Raises DamagedFile for a file that is no tokenizer."""
    file = next((folder / name for name in (TOKENIZER, *OLDER_FILES) if (folder / name).exists()), None)
    if file is None:
        return None
    names = _special_tokens([_read_settings(folder / name) for name in SPECIAL_TOKEN_FILES])
    if file.name == TOKENIZER:
        content = read_json(file, "a tokenizer", max_bytes=MAX_TOKENIZER_BYTES)
    elif file.name == VOCABULARY:
        names = {**BERT_SPECIAL_TOKENS, **names}
        content = read_word_pieces(file, names, _read_settings(folder / SETTINGS))
    else:
        content, special_tokens = convert_tokenizer(file)
        names = {**_special_tokens([special_tokens]), **names}
    stop_ids = _read_stop_ids(folder)
    return _read_content(file, content, names, stop_ids)


def read_hf_tokenizers(folder: Path) -> tuple[ForeignTokenizer, ForeignTokenizer] | None:
    """The tokenizers of sources and of targets: one for both, or those of the two languages of a Marian."""
    piece_files = [folder / name for name in PIECE_MODELS]
    if (folder / TOKENIZER).exists() or not all(file.exists() for file in piece_files):
        tokenizer = read_hf_tokenizer(folder)
        if tokenizer is None:
            return None
        return (tokenizer, tokenizer)

    names = {
        **MARIAN_SPECIAL_TOKENS,
        **_special_tokens([_read_settings(folder / name) for name in SPECIAL_TOKEN_FILES]),
    }
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
    return next(filter(None, (_stop_ids(_read_settings(folder / name)) for name in (GENERATION, CONFIG))), [])


def _special_tokens(files: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The special tokens by their kinds, those of the first files first."""
    names: dict[str, str] = {}
    for settings in files:
        for hf_kind, kind in KINDS.items():
            token = settings.get(f"{hf_kind}_token")
            if isinstance(token, dict):
                token = token.get("content")
            if isinstance(token, str):
                names.setdefault(kind, token)
    return names


def _read_settings(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where the file is missing."""
    if file.exists():
        content = read_json(file, "settings of a tokenizer")
    else:
        content = {}
    if isinstance(content, dict):
        return content
    return {}


def _stop_ids(settings: dict[str, Any]) -> list[int]:
    value = settings.get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    return [token for token in ids if type(token) is int]


BERT_SPECIAL_TOKENS = {"unk": "[UNK]", "pad": "[PAD]", "bos": "[CLS]", "eos": "[SEP]", "mask": "[MASK]"}
"""The special tokens of BERT by our kinds."""

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
    # before any library parses it
    if file.stat().st_size > MAX_TOKENIZER_BYTES:
        raise DamagedFile(f"{file} is damaged: it has more than {MAX_TOKENIZER_BYTES:,} bytes")
    try:
        hf = load_auto_tokenizer(file.parent)
    except ImportError as error:
        raise missing_package(file, _package_of(error)) from None
    except RefusedByLibrary as error:
        if _read_settings(file.with_name(SETTINGS)).get("auto_map"):
            raise UserError(
                f"{file.with_name(SETTINGS)}: auto_map names Python code of the folder as its tokenizer, and no code "
                "of a folder is run; save the tokenizer with a tokenizer.json"
            ) from None
        raise DamagedFile(f"{file} cannot be read as a tokenizer: {error}") from None
    inner = getattr(hf, "backend_tokenizer", None)
    if inner is None:
        raise UserError(f"{file} is read by {type(hf).__name__}, which has no equal tokenizer.json")
    names = {name: str(token) for name, token in hf.special_tokens_map.items() if isinstance(token, str)}
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
    # the vocabulary decides the ids, and the model of sentencepiece the scores
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
    # added tokens are found before the text is normalized, which would divide them
    codes = [piece for piece in vocabulary if piece.startswith(">>") and piece.endswith("<<")]
    inner.add_tokens([tokenizers.AddedToken(code, normalized=False) for code in codes])
    content: dict[str, Any] = json.loads(inner.to_str())
    return content


def _read_vocabulary(file: Path, names: Mapping[str, str]) -> list[str]:
    """The pieces in the order of their ids, which must be those from 0 on."""
    if not file.exists():
        raise UserError(f"{file} is missing, which has the token ids of source.spm and target.spm")
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


NO_LIMIT = 10**30
"""The `model_max_length` of a tokenizer whose model has none, as `transformers` writes it."""


def write_tokenizer(folder: Path, tokenizer: Tokenizer, kind: "AutoClass", max_length: int | None) -> None:
    """Write tokenizer.json and tokenizer_config.json, with the same token ids and special tokens.

    Texts are framed as models of this kind read them. A name of a special token in a text is text, as it is here
    (`split_special_tokens`). Raises UserError for a tokenizer that the `tokenizers` library cannot express.
    """
    inner = fast_tokenizer(tokenizer)
    names = {special: str(inner.id_to_token(getattr(tokenizer, special))) for special in SpecialIds._fields}
    # texts of a language model are continued, so nothing is put around them
    if kind.begins or kind.ends:
        inner.post_processor = _frame(tokenizer, names, kind)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{special}_token": name for special, name in names.items()},
        # what a user types is text, even where it spells a special token
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length or NO_LIMIT,
        "model_input_names": ["input_ids", "attention_mask"],
        # generation continues at the right end of a row
        "padding_side": "left" if kind.suffix == "CausalLM" else "right",
    }
    atomic_write_text(folder / TOKENIZER, inner.to_str(pretty=True) + "\n")
    atomic_write_text(folder / SPECIAL_TOKEN_FILES[0], json_text(config, indent=2) + "\n")


def fast_tokenizer(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """The equal tokenizer of the `tokenizers` library. Raises UserError if there is none."""
    convert = CONVERTERS.get(type(tokenizer))
    if convert is None:
        kinds = ", ".join(converted.kind for converted in CONVERTERS)
        raise UserError(f"a tokenizer of kind {tokenizer.kind} has no equal in transformers; those of {kinds} have")
    return convert(tokenizer)


def _frame(tokenizer: Tokenizer, names: Mapping[str, str], kind: "AutoClass") -> processors.TemplateProcessing:
    """Texts with the start token before them and the end token after each, if the models have them."""
    begin = [names["bos"]] * kind.begins
    end = [names["eos"]] * kind.ends
    return processors.TemplateProcessing(
        single=[*begin, "$A", *end],
        pair=[*begin, "$A", *end, "$B:1", *(f"{name}:1" for name in end)],
        special_tokens=[(names[special], getattr(tokenizer, special)) for special in ("bos", "eos")],
    )


def _characters(tokenizer: Any) -> tokenizers.Tokenizer:
    vocabulary = {name: number for number, name in enumerate((*SPECIALS, *tokenizer.characters))}
    inner = tokenizers.Tokenizer(WordLevel(vocabulary, unk_token=SPECIALS[tokenizer.unk]))
    # any sign: a dot would leave out line ends
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(list(SPECIALS))
    return inner


def _bytes(tokenizer: Any) -> tokenizers.Tokenizer:
    characters = sorted(byte_of_character().items(), key=lambda pair: pair[1])
    # each byte has the sign that byte-level tokenizers give it, in the order of bytes
    vocabulary = {name: number for number, name in enumerate((*SPECIALS, *(sign for sign, _ in characters)))}
    inner = tokenizers.Tokenizer(BPE(vocabulary, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(SPECIALS))
    return inner


def _wrapped(tokenizer: Any) -> tokenizers.Tokenizer:
    return read_tokenizer(tokenizer.content()["tokenizers"])


CONVERTERS: Mapping[type[Tokenizer], Callable[[Any], tokenizers.Tokenizer]] = {
    CharTokenizer: _characters,
    ByteTokenizer: _bytes,
    BPETokenizer: _wrapped,
    ForeignTokenizer: _wrapped,
}
