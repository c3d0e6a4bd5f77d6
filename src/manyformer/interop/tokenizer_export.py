"""Tokenizers of this library as files that `AutoTokenizer` of Hugging Face's `transformers` loads."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, pre_tokenizers, processors
from tokenizers.models import BPE, WordLevel

from manyformer.data.foreign_tokenizer import ForeignTokenizer, SpecialIds
from manyformer.data.native_tokenizers import BPETokenizer, ByteTokenizer, CharTokenizer, byte_of_character
from manyformer.data.tokenizer import SPECIALS, Tokenizer
from manyformer.errors import UserError
from manyformer.files.atomic_files import atomic_write_text
from manyformer.files.json_text import json_text
from manyformer.interop.auto_classes import AutoClass
from manyformer.interop.foreign_texts import SPECIAL_TOKEN_FILES, TOKENIZER
from manyformer.libraries.tokenizer_rules import read_tokenizer

NO_LIMIT = 10**30
"""The `model_max_length` of a tokenizer whose model has none, as `transformers` writes it."""


def write_tokenizer(folder: Path, tokenizer: Tokenizer, kind: AutoClass, max_length: int | None) -> None:
    """Write tokenizer.json and tokenizer_config.json, with the same token ids and special tokens.

    Texts are framed as models of this kind read them. A name of a special token in a text is text, as it is here
    (`split_special_tokens`). Raises UserError for a tokenizer that the `tokenizers` library cannot express.
    """
    inner = fast_tokenizer(tokenizer)
    names = {special: str(inner.id_to_token(getattr(tokenizer, special))) for special in SpecialIds._fields}
    if kind.begins or kind.ends:
        inner.post_processor = _frame(tokenizer, names, kind)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{special}_token": name for special, name in names.items()},
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length or NO_LIMIT,
        "model_input_names": ["input_ids", "attention_mask"],
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


def _frame(tokenizer: Tokenizer, names: Mapping[str, str], kind: AutoClass) -> processors.TemplateProcessing:
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
