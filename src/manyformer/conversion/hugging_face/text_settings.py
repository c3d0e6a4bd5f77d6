"""What a folder of `transformers` says about texts: the tokenizers, the labels, and what begins and ends a text."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from manyformer.base.errors import UserError
from manyformer.base.files.json_records import read_json
from manyformer.conversion.hugging_face.families import ModelFamily
from manyformer.conversion.hugging_face.hf_folder import CONFIG, GENERATION, HFConfig
from manyformer.conversion.hugging_face.tokenizer_exchange import read_hf_tokenizers
from manyformer.data.tokenizers.pixel_tokenizer import ImageShape, PixelTokenizer
from manyformer.data.tokenizers.tokenizer import Tokenizer
from manyformer.models.image_classifier import MAX_PIXEL_VALUE
from manyformer.models.model_files import GenerationSettings
from manyformer.recipes.parts.registry import get_recipe

SEARCH_OPTIONS = {
    "num_beams": "--beam",
    "length_penalty": "--length-penalty",
    "early_stopping": None,
    "no_repeat_ngram_size": "--no-repeat-ngram",
    "repetition_penalty": "--repetition-penalty",
    "max_length": "--max-new",
    "max_new_tokens": "--max-new",
    "min_length": None,
    "min_new_tokens": None,
    "do_sample": "--temperature",
    "temperature": "--temperature",
    "top_k": "--top-k",
    "top_p": "--top-p",
}
"""The settings of a search, which each call chooses here, with the option that does."""

REFUSED = ("begin_suppress_tokens", "forced_decoder_ids", "sequence_bias")


class TextSettings(NamedTuple):
    """How the inputs and outputs of a model are read and written, and the settings that are left out, with reasons."""

    tokenizer: Tokenizer | tuple[Tokenizer, Tokenizer] | None = None
    labels: tuple[str, ...] | None = None
    generation: GenerationSettings | None = None
    left_out: Mapping[str, str] = {}


def read_text_settings(config: HFConfig, family: ModelFamily, keywords: Mapping[str, Any]) -> TextSettings:
    """The tokenizer of a model with these keywords, the names of its labels, and what begins and ends its texts.

    Raises UserError for a tokenizer with more tokens than the model, and for settings that generation does not have."""
    labels = None
    if keywords.get("classes") and not config.is_bare:
        labels = config.labels()
    if "channels" in keywords:
        shape = ImageShape(*(keywords[name] for name in ("height", "width", "channels")))
        return TextSettings(PixelTokenizer(MAX_PIXEL_VALUE + 1, shape), labels)
    # features or trajectories: nothing to tokenize
    if "vocab" not in keywords:
        return TextSettings(labels=labels)
    folder = config.file.parent
    vocab = keywords["vocab"]
    tokenizers = read_hf_tokenizers(folder)
    generation = HFGeneration(folder, vocab)
    for tokenizer, size in zip(tokenizers or (), (keywords.get("source_vocab") or vocab, vocab)):
        if tokenizer.vocab > size:
            raise UserError(f"{folder} has a tokenizer of {tokenizer.vocab:,} tokens, but its model has {size:,}")
    task = get_recipe(family.recipe).card.task
    if not task.takes_source:
        reader = tokenizers and tokenizers[0]
        left_out = generation.search_options()
        if task.generates is not None:
            left_out |= generation.settings_without_use(reader)
        return TextSettings(reader, labels, left_out=left_out)
    settings = generation.settings()
    pair = tokenizers and (
        tokenizers[0].for_sources(),
        tokenizers[1].for_targets(settings.start, settings.forced_first),
    )
    return TextSettings(pair, labels, settings, generation.search_options())


class HFGeneration:
    """What generation_config.json says, and config.json where that says nothing; every method raises UserError."""

    def __init__(self, folder: Path, vocab: int) -> None:
        self._folder = folder
        self._vocab = vocab
        self._contents = {name: _read_generation(folder / name) for name in (GENERATION, CONFIG)}

    def search_options(self) -> dict[str, str]:
        """The settings of a search in generation_config.json, by name and value, with what is done instead."""
        content = self._contents[GENERATION]
        return {
            f"{GENERATION}: {name} {content[name]}": f"each call decides it ({option})" if option else "no option"
            for name, option in SEARCH_OPTIONS.items()
            if content.get(name) is not None
        }

    def settings_without_use(self, tokenizer: Tokenizer | None) -> dict[str, str]:
        """What a language model may not write, or always writes, by name and value, with what is done instead."""
        if tokenizer is None:
            never = set()
        else:
            never = {tokenizer.pad, tokenizer.bos, *range(tokenizer.vocab, self._vocab)}
        notes = {}
        for name in ("suppress_tokens", "bad_words_ids", "forced_bos_token_id", "forced_eos_token_id", *REFUSED):
            file, value = self._value(name)
            # what is never written anyway needs no note
            if value is None or (name == "suppress_tokens" and never.issuperset(self._ids(name))):
                continue
            notes[f"{file.name}: {name} {value!r:.60}"] = "only padding and the start token are never written"
        return notes

    def settings(self) -> GenerationSettings:
        """The settings of an encoder-decoder."""
        for name in REFUSED:
            file, value = self._value(name)
            if value is not None:
                raise UserError(f"{file}: {name} is {value!r:.60}, which our generation does not have")
        stop_ids = self._ids("eos_token_id")
        if not stop_ids:
            raise UserError(f"{self._folder / CONFIG}: eos_token_id must be a token id, because no token ends a text")
        start, bos, pad = (self._id(name) for name in ("decoder_start_token_id", "bos_token_id", "pad_token_id"))
        # files of older models name the start token of texts alone
        start = bos if start is None else start
        if start is None:
            raise UserError(f"{self._folder / CONFIG}: decoder_start_token_id must be the token that texts begin with")
        return GenerationSettings(
            start=start,
            pad=start if pad is None else pad,
            stop_ids=stop_ids,
            banned_ids=tuple(sorted({*self._banned_words(), *self._ids("suppress_tokens")})),
            forced_first=self._id("forced_bos_token_id"),
            forced_last=self._id("forced_eos_token_id"),
        )

    def _value(self, name: str) -> tuple[Path, Any]:
        """The file that has a setting, and its value; None if there is none."""
        for file, content in self._contents.items():
            if content.get(name) is not None:
                return self._folder / file, content[name]
        return self._folder / CONFIG, None

    def _id(self, name: str) -> int | None:
        ids = self._ids(name)
        if len(ids) > 1:
            raise UserError(f"{self._value(name)[0]}: {name} ({list(ids)}) must be one token id")
        if ids:
            return ids[0]
        return None

    def _ids(self, name: str) -> tuple[int, ...]:
        file, value = self._value(name)
        if isinstance(value, list):
            ids = value
        else:
            ids = [] if value is None else [value]
        for token in ids:
            if type(token) is not int or not 0 <= token < self._vocab:
                raise UserError(f"{file}: {name} ({value!r:.60}) must be a token id from 0 to {self._vocab - 1}")
        return tuple(ids)

    def _banned_words(self) -> tuple[int, ...]:
        file, words = self._value("bad_words_ids")
        if words is None:
            return ()
        is_list = isinstance(words, list) and all(isinstance(word, list) and len(word) == 1 for word in words)
        ids = [word[0] for word in words] if is_list else []
        if not is_list or any(type(token) is not int or not 0 <= token < self._vocab for token in ids):
            raise UserError(f"{file}: bad_words_ids ({words!r:.60}) must be a list of single tokens, each in a list")
        return tuple(ids)


def _read_generation(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where the file is missing."""
    if file.exists():
        content = read_json(file, "settings of generation")
    else:
        content = {}
    if not isinstance(content, dict):
        raise UserError(f"{file} must hold an object with settings of generation")
    return content
