"""Folders that `transformers` wrote, as models of this library."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from manyformer.base.errors import UserError, suggest_names
from manyformer.base.files import TOKENIZER_FILES
from manyformer.base.files.verified_folder import VerifiedFolder
from manyformer.conversion.hugging_face.families import PAD_ID, ModelFamily, TensorRule, family_of_type, model_types
from manyformer.conversion.hugging_face.hf_folder import (
    ADAPTER_CONFIG,
    MODEL_TYPE,
    AdaptedWeights,
    HFConfig,
    WeightFiles,
    is_adapter,
)
from manyformer.conversion.hugging_face.text_settings import TextSettings, read_text_settings
from manyformer.data.tokenizers.saved_tokenizers import TokenizerPair, load_tokenizers
from manyformer.data.tokenizers.tokenizer import Tokenizer
from manyformer.models.model import Model
from manyformer.models.model_files import is_hugging_face, replacement_folder, warn_non_finite
from manyformer.recipes.parts.registry import Recipe, build, get_recipe, read_saved_recipe


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
