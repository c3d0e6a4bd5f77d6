"""Folders that `transformers` wrote, as models of this library.

Besides the weights a folder says how texts are read and written: its tokenizers, its labels, and what begins and ends a
text."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from manyformer.base.errors import UserError, suggest_names
from manyformer.base.files import TOKENIZER_FILES
from manyformer.base.files.json_records import read_json
from manyformer.base.files.verified_folder import VerifiedFolder
from manyformer.conversion.hugging_face.families import PAD_ID, ModelFamily, TensorRule, family_of_type, model_types
from manyformer.conversion.hugging_face.hf_folder import (
    ADAPTER_CONFIG,
    CONFIG,
    GENERATION,
    MODEL_TYPE,
    AdaptedWeights,
    HFConfig,
    WeightFiles,
    is_adapter,
)
from manyformer.conversion.hugging_face.tokenizer_exchange import read_hf_tokenizers
from manyformer.data.tokenizers.pixel_tokenizer import ImageShape, PixelTokenizer
from manyformer.data.tokenizers.saved_tokenizers import TokenizerPair, load_tokenizers
from manyformer.data.tokenizers.tokenizer import Tokenizer
from manyformer.models.image_classifier import MAX_PIXEL_VALUE
from manyformer.models.model import Model
from manyformer.models.model_files import GenerationSettings, is_hugging_face, replacement_folder, warn_non_finite
from manyformer.recipes.parts.cards import Recipe
from manyformer.recipes.parts.registry import build, get_recipe, read_saved_recipe

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


class ImportReport(NamedTuple):
    """What became of an imported model: the tensors that were read, and those left out with the reason for each.

    `new` are the tensors of ours that no file has: those of the head of an encoder that has none."""

    family: str
    recipe: str
    keywords: dict[str, Any]
    tensors: int
    left_out: dict[str, str]
    parameters: int
    new: tuple[str, ...] = ()


class ImportedModel(NamedTuple):
    """A model with the weights of a Hugging Face model, in evaluation mode, and what became of these."""

    model: Model
    report: ImportReport


class TextSettings(NamedTuple):
    """How the inputs and outputs of a model are read and written, and the settings that are left out, with reasons."""

    tokenizer: Tokenizer | tuple[Tokenizer, Tokenizer] | None = None
    labels: tuple[str, ...] | None = None
    generation: GenerationSettings | None = None
    left_out: Mapping[str, str] = {}


class HFDescription(NamedTuple):
    """What a folder says of its model besides the weights: its config and family, and the keywords of the recipe.

    `names` are from those of the family's rules to those of the tensors in files."""

    config: HFConfig
    family: ModelFamily
    names: dict[str, str]
    keywords: dict[str, Any]

    def read_texts(self) -> TextSettings:
        """The tokenizers, labels and settings of generation."""
        return read_text_settings(self.config, self.family, self.keywords)


def read_hf_description(folder: Path) -> HFDescription:
    """What a folder that `transformers` wrote says of its model; of the weights only the names are read."""
    description, _ = _open_folder(folder)
    return description


def read_recipe(folder: Path) -> tuple[Recipe, dict[str, Any]]:
    """The recipe and keywords of the model in a folder, those of the equal recipe for a model of `transformers`.

    Raises UserError for a folder without a model, and for one that no imported recipe equals."""
    if not is_hugging_face(folder):
        return read_saved_recipe(folder)
    description = read_hf_description(folder)
    return get_recipe(description.family.recipe), description.keywords


def read_tokenizers(folder: Path) -> TokenizerPair:
    """The tokenizers and labels of the model in a folder. Raises UserError for a model that has none."""
    if is_hugging_face(folder):
        texts = read_hf_description(folder).read_texts()
        if texts.tokenizer is not None:
            if isinstance(texts.tokenizer, tuple):
                pair = texts.tokenizer
            else:
                pair = (texts.tokenizer, texts.tokenizer)
            return TokenizerPair(*pair, texts.labels)
    elif any(name in VerifiedFolder.open(folder) for name in TOKENIZER_FILES):
        return load_tokenizers(folder)
    raise UserError(f"{folder} has no tokenizer, which reads the inputs of its model")


def _open_folder(folder: Path, base: Path | None = None) -> tuple[HFDescription, WeightFiles]:
    """The description of a model and its weights; the family is judged first, whatever the weights are.

    With `base` the folder has adapters, which are merged into the model in `base`."""
    if base is None and is_adapter(folder):
        raise UserError(f"{folder} holds adapters, no model: give the folder of the model as base (--base FOLDER)")
    if base is not None and not is_adapter(folder):
        raise UserError(
            f"{folder} holds no adapters (an {ADAPTER_CONFIG} without a config.json), so base does not belong here"
        )
    config = HFConfig.read(folder if base is None else base)
    # judged before the weights: a family that no recipe equals needs no file of them
    family = family_of(config)
    if base is None:
        weights = WeightFiles(folder)
    else:
        weights = AdaptedWeights(base, folder)
    names = family.complete_names(weights.keys())
    # some settings follow from which tensors there are, such as whether the output is tied
    keywords = family.read_keywords(config._replace(tensors=names))
    return HFDescription(config, family, names, keywords), weights


def import_model(folder: str | Path, *, base: str | Path | None = None) -> ImportedModel:
    """The model in a folder that `save_pretrained` of Hugging Face's `transformers` wrote, as the equal recipe.

    Its tokenizer, if there is one, keeps its token ids. Weights are read tensor by tensor, from one safetensors file or
    several, and converted to float32. Raises UserError for a family or settings that no recipe has, for weights that
    are no safetensors, and for a tensor that is missing, unknown or of another shape; the sentence names the file and
    the tensor or the setting.

    An encoder without a head, such as a `BertModel`, gets a new one with random weights, which the report names:
    `init_from` takes the rest for a head of any task. A folder with LoRA adapters of `peft` is merged into the model
    in the folder `base`, which they were trained on.
    """
    description, weights = _open_folder(Path(folder), None if base is None else Path(base))
    config = description.config
    family = description.family
    names = description.names
    # read before the model is built, which takes longer: mistakes in small files come first
    texts = description.read_texts()
    try:
        model = build(family.recipe, **description.keywords)
    except ValueError as error:
        raise UserError(f"{config.file}: {error}") from None
    rules = list(family.tensor_rules({**model.spec.keywords, PAD_ID: config.whole_number("pad_token_id", 1)}))
    if config.is_bare and family.head_is_optional:
        new = _parts_of_new_head(rules)
    else:
        new = ()
    rules = [rule for rule in rules if not set(rule.ours) & set(new)]
    left_out = _left_over(family, names, rules, weights)
    _fill(model, rules, names, weights, new, Path(folder))
    parameters = sum(weight.numel() for weight in model.parameters())
    tensors = sum(len(rule.hf) for rule in rules if rule.ours)
    model.tokenizer = texts.tokenizer
    model.labels = texts.labels
    model.generation = texts.generation
    left_out |= {**texts.left_out, **config.attention_dropout()}
    report = ImportReport(family.title, family.recipe, model.spec.keywords, tensors, left_out, parameters, new)
    return ImportedModel(model.eval(), report)


def save_imported(model: Model, folder: str | Path) -> None:
    """Write an imported model with its tokenizer, as `mf.load` and the commands read it."""
    with replacement_folder(Path(folder)) as draft:
        if isinstance(model.tokenizer, Tokenizer):
            TokenizerPair(model.tokenizer, model.tokenizer, model.labels).save(draft)
        elif model.tokenizer is not None:
            TokenizerPair(*model.tokenizer).save(draft)
        model.write_files(draft)


def family_of(config: HFConfig) -> ModelFamily:
    """The family of the model that a config describes. Raises UserError if there is none."""
    model_type = config.content.get("model_type")
    if not isinstance(model_type, str):
        raise UserError(f"{config.file} does not say what the model is: it has no model_type")
    if model_type == MODEL_TYPE:
        from manyformer.conversion.hugging_face.exported_config import wrapped_family

        return wrapped_family(config)
    if model_type not in (known := model_types()):
        suggestion = suggest_names(model_type, known)
        raise UserError(f"{config.file}: no recipe equals models of type {model_type!r:.60}; {suggestion}")
    return family_of_type(model_type)


def _left_over(
    family: ModelFamily, names: Mapping[str, str], rules: list[TensorRule], weights: WeightFiles
) -> dict[str, str]:
    """The tensors that are not needed, with the reasons. Raises UserError for one of which nothing is known."""
    read = {name for rule in rules if rule.ours for name in rule.hf}
    left_out = {}
    for name in sorted(names.keys() - read):
        reason = family.reason_to_leave_out(name)
        if reason is None:
            raise UserError(
                f"{weights.file_of(names[name])} has the tensor {names[name]}, for which the recipe {family.recipe} "
                "has no place"
            )
        left_out[names[name]] = reason
    return left_out


def _parts_of_new_head(rules: list[TensorRule]) -> tuple[str, ...]:
    """The tensors that only the head has."""
    return tuple(name for rule in rules for name in rule.ours if name.startswith("head."))


def _fill(
    model: Model,
    rules: list[TensorRule],
    names: Mapping[str, str],
    weights: WeightFiles,
    new: Collection[str],
    folder: str | Path,
) -> None:
    """Copy the tensors into the weights of the model, all but the `new` ones."""
    expected: dict[str, Tensor] = model.state_dict(keep_vars=True)
    filled: set[int] = set()
    for rule in (rule for rule in rules if rule.ours):
        targets = [expected[name] for name in rule.ours]
        # by identity, because tied weights stand in the state dict under several names
        filled |= set(map(id, targets))
        # what the stored tensors must look like, computed without memory by the way back
        shapes = rule.to_hf([torch.empty(target.shape, device="meta") for target in targets])
        sources = []
        for name, like in zip(rule.hf, shapes, strict=True):
            if name not in names:
                raise UserError(f"the weights lack the tensor {name}, which the recipe {model.spec.recipe} needs")
            source = weights[names[name]]
            if source.shape != like.shape:
                file = weights.file_of(names[name])
                raise UserError(f"{file}: {names[name]} has the shape {tuple(source.shape)}, not {tuple(like.shape)}")
            sources.append(source.to(targets[0].dtype))
        with torch.no_grad():
            for target, value in zip(targets, rule.to_ours(sources), strict=True):
                target.copy_(value)
    unfilled = [name for name, target in expected.items() if id(target) not in filled and name not in new]
    assert not unfilled, f"no rule fills {unfilled}"
    warn_non_finite(model, folder)


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
