"""Vocabularies of word pieces, which older folders of BERT and DistilBERT have in place of a tokenizer.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from manyformer.data.tokenizer_kinds import MAX_TOKENIZER_BYTES
from manyformer.files.json_records import DamagedFile, read_bounded

VOCABULARY = "vocab.txt"

BERT_SPECIAL_TOKENS = {"unk": "[UNK]", "pad": "[PAD]", "bos": "[CLS]", "eos": "[SEP]", "mask": "[MASK]"}
"""The special tokens of BERT by our kinds."""


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
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    inner.post_processor = processors.BertProcessing((last, vocabulary[last]), (first, vocabulary[first]))
    inner.add_special_tokens([token for token in names.values() if token in vocabulary])
    content: dict[str, Any] = json.loads(inner.to_str())
    return content
