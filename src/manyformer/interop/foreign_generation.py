"""The settings of generation in the folder of a foreign encoder-decoder."""

from pathlib import Path
from typing import Any

from manyformer.data.tokenizer import NativeTokenizer, Tokenizer
from manyformer.errors import UserError
from manyformer.files.json_records import read_json
from manyformer.interop.foreign_config import CONFIG
from manyformer.models import Model
from manyformer.models.generation_settings import GenerationSettings

GENERATION = "generation_config.json"

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


class ForeignGeneration:
    """What generation_config.json says, and config.json where that says nothing; every method raises UserError."""

    def __init__(self, folder: Path, vocab: int) -> None:
        self._folder, self._vocab = folder, vocab
        self._contents = {name: _read_object(folder / name) for name in (GENERATION, CONFIG)}

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
        never = set() if tokenizer is None else {tokenizer.pad, tokenizer.bos, *range(tokenizer.vocab, self._vocab)}
        notes = {}
        for name in ("suppress_tokens", "bad_words_ids", "forced_bos_token_id", "forced_eos_token_id", *REFUSED):
            file, value = self._value(name)
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
        return ids[0] if ids else None

    def _ids(self, name: str) -> tuple[int, ...]:
        file, value = self._value(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
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


def generation_of(model: Model) -> GenerationSettings:
    """The settings of an encoder-decoder; those of one from this library are what its tokenizer says."""
    if model.generation is not None:
        return model.generation
    target = model.tokenizer[1] if isinstance(model.tokenizer, tuple) else model.tokenizer or NativeTokenizer
    banned = {target.pad, target.bos} - set(target.stop_ids)
    return GenerationSettings(
        start=target.bos, pad=target.pad, stop_ids=target.stop_ids, banned_ids=tuple(sorted(banned))
    )


def generation_content(settings: GenerationSettings) -> dict[str, Any]:
    """The content of the generation_config.json of an encoder-decoder."""
    content: dict[str, Any] = {
        "decoder_start_token_id": settings.start,
        "pad_token_id": settings.pad,
        "eos_token_id": list(settings.stop_ids) if len(settings.stop_ids) > 1 else settings.stop_ids[0],
        "forced_bos_token_id": settings.forced_first,
        "forced_eos_token_id": settings.forced_last,
        "bad_words_ids": [[token] for token in settings.banned_ids] or None,
    }
    return {name: value for name, value in content.items() if value is not None}


def _read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where the file is missing."""
    content = read_json(file, "settings of generation") if file.exists() else {}
    if not isinstance(content, dict):
        raise UserError(f"{file} must hold an object with settings of generation")
    return content
