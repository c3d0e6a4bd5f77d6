"""Folders that `transformers` wrote, as models of this library."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from manyformer.data import Tokenizer
from manyformer.data.pixel_tokenizer import ImageShape, PixelTokenizer
from manyformer.data.saved_tokenizers import TokenizerPair
from manyformer.errors import UserError, suggest_names
from manyformer.interop.auto_classes import MODEL_TYPE
from manyformer.interop.families import FAMILY_OF_TYPE
from manyformer.interop.foreign_config import ForeignConfig
from manyformer.interop.foreign_generation import ForeignGeneration
from manyformer.interop.foreign_tokenizer_files import read_foreign_tokenizer
from manyformer.interop.model_family import PAD_ID, ModelFamily
from manyformer.interop.tensor_rules import TensorRule
from manyformer.interop.weight_files import WeightFiles
from manyformer.interop.wrapped_models import wrapped_family
from manyformer.models import Model
from manyformer.models.model_files import replacement_folder
from manyformer.models.patch_embedding import MAX_PIXEL_VALUE
from manyformer.recipes import build
from manyformer.recipes.registry import get_recipe


class ImportReport(NamedTuple):
    """What became of a foreign model: the tensors that were read, and those left out with the reason for each."""

    family: str
    recipe: str
    keywords: dict[str, Any]
    tensors: int
    left_out: dict[str, str]
    parameters: int


class ImportedModel(NamedTuple):
    """A model with the weights of a foreign one, in evaluation mode, and what became of these."""

    model: Model
    report: ImportReport


def import_model(folder: str | Path) -> ImportedModel:
    """The model in a folder that `save_pretrained` of Hugging Face's `transformers` wrote, as the equal recipe.

    Its tokenizer, if there is one, keeps its token ids. Weights are read tensor by tensor, from one safetensors file or
    several, and converted to float32. Raises UserError for a family or settings that no recipe has, for weights that
    are no safetensors, and for a tensor that is missing, unknown or of another shape; the sentence names the file and
    the tensor or the setting.
    """
    folder = Path(folder)
    config = ForeignConfig.read(folder)
    family = family_of(config)
    with WeightFiles(folder) as weights:
        names = family.complete_names(weights.keys())
        keywords = family.read_keywords(config, names.keys())
        try:
            model = build(family.recipe, **keywords)
        except ValueError as error:
            raise UserError(f"{config.file}: {error}") from None
        rules = list(family.rules({**model.spec.keywords, PAD_ID: config.whole_number("pad_token_id", 1)}))
        left_out = _left_over(family, names, rules, weights)
        _fill(model, rules, names, weights)
    parameters = sum(weight.numel() for weight in model.parameters())
    tensors = sum(len(rule.theirs) for rule in rules if rule.ours)
    model.labels = config.labels() if keywords.get("classes") else None
    if "vocab" in keywords:
        left_out |= _read_text_settings(model, folder)
    elif "channels" in keywords:
        model.tokenizer = _pixel_tokenizer(keywords)
    report = ImportReport(family.title, family.recipe, model.spec.keywords, tensors, left_out, parameters)
    return ImportedModel(model.eval(), report)


def _pixel_tokenizer(keywords: Mapping[str, Any]) -> PixelTokenizer:
    """The tokenizer of images of a model's size, which stands beside the labels of a saved model."""
    return PixelTokenizer(
        MAX_PIXEL_VALUE + 1, ImageShape(*(keywords[name] for name in ("height", "width", "channels")))
    )


def save_imported(model: Model, folder: str | Path) -> None:
    """Write an imported model with its tokenizer, as `mf.load` and the commands read it."""
    with replacement_folder(Path(folder)) as draft:
        if isinstance(model.tokenizer, Tokenizer):
            TokenizerPair(model.tokenizer, model.tokenizer, model.labels).save(draft)
        elif model.tokenizer is not None:
            TokenizerPair(*model.tokenizer).save(draft)
        model.write_files(draft)


def family_of(config: ForeignConfig) -> ModelFamily:
    """The family of the model that a config describes. Raises UserError if there is none."""
    model_type = config.content.get("model_type")
    if not isinstance(model_type, str):
        raise UserError(f"{config.file} does not say what the model is: it has no model_type")
    if model_type == MODEL_TYPE:
        return wrapped_family(config)
    if model_type not in FAMILY_OF_TYPE:
        suggestion = suggest_names(model_type, FAMILY_OF_TYPE)
        raise UserError(f"{config.file}: no recipe equals models of type {model_type!r:.60}; {suggestion}")
    return FAMILY_OF_TYPE[model_type]


def _read_text_settings(model: Model, folder: Path) -> dict[str, str]:
    """Read the tokenizer of a model, and what begins and ends its texts; returns the settings that are left out."""
    vocab: int = model.spec.keywords["vocab"]
    tokenizer, generation = read_foreign_tokenizer(folder), ForeignGeneration(folder, vocab)
    if tokenizer is not None and tokenizer.vocab > vocab:
        raise UserError(f"{folder} has a tokenizer of {tokenizer.vocab:,} tokens, but its model has {vocab:,}")
    model.tokenizer = tokenizer
    if get_recipe(model.spec.recipe).card.task.takes_source:
        model.generation = generation.settings()
        if tokenizer is not None:
            model.tokenizer = tokenizer.for_sources(), tokenizer.for_targets(model.generation.start)
    return generation.search_options()


def _left_over(
    family: ModelFamily, names: Mapping[str, str], rules: list[TensorRule], weights: WeightFiles
) -> dict[str, str]:
    """The tensors that are not needed, with the reasons. Raises UserError for one of which nothing is known."""
    read = {name for rule in rules if rule.ours for name in rule.theirs}
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


def _fill(model: Model, rules: list[TensorRule], names: Mapping[str, str], weights: WeightFiles) -> None:
    """Copy the tensors into the weights of the model."""
    expected: dict[str, Tensor] = model.state_dict(keep_vars=True)
    filled: set[int] = set()
    for rule in (rule for rule in rules if rule.ours):
        targets = [expected[name] for name in rule.ours]
        filled |= set(map(id, targets))
        shapes = rule.to_theirs([torch.empty(target.shape, device="meta") for target in targets])
        sources = []
        for name, like in zip(rule.theirs, shapes, strict=True):
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
    unfilled = [name for name, target in expected.items() if id(target) not in filled]
    assert not unfilled, f"no rule fills {unfilled}"
