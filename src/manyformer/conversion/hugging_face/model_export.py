"""Models of this library as folders that `transformers` loads, with their cards, and the upload to the hub."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from manyformer.base import VERSION
from manyformer.base.errors import UserError, suggest_names
from manyformer.base.files.atomic_files import atomic_path, atomic_write_text, make_folder
from manyformer.base.files.json_text import json_text
from manyformer.base.files.verified_folder import MARK
from manyformer.base.libraries import RefusedByLibrary, upload_folder
from manyformer.conversion.hugging_face.exported_config import (
    PREFIX,
    AutoClass,
    auto_class_of,
    config_fields,
    generation_fields,
    label_fields,
    spec_fields,
    special_token_ids,
    stored_names,
    write_loader,
)
from manyformer.conversion.hugging_face.families import PAD_ID, Keywords, ModelFamily, all_families
from manyformer.conversion.hugging_face.families.vit import preprocessor_files
from manyformer.conversion.hugging_face.hf_folder import CONFIG, GENERATION, SPEC_FIELD, WEIGHTS
from manyformer.conversion.hugging_face.tokenizer_exchange import write_tokenizer
from manyformer.data.tokenizers.tokenizer import Tokenizer
from manyformer.models.model import Model
from manyformer.models.model_files import refuse_changed_modules, replacement_folder
from manyformer.recipes.parts.registry import REMOVED_HEADS, SHARED_QK_DIM, get_recipe
from manyformer.recipes.parts.speedrun_parts import COMPUTED_PARTS

OF_OUR_OWN = {
    REMOVED_HEADS: "classes of transformers have all",
    SHARED_QK_DIM: "heads of classes of transformers share no dimensions",
    **dict.fromkeys(COMPUTED_PARTS, "classes of transformers do not have this part"),
}
"""Keywords without a counterpart, with the reasons."""

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""The types that weights may be written in."""

TARGET_FOLDER = "target"
"""The folder of the tokenizer that writes, where it is not the one that reads."""


class ExportReport(NamedTuple):
    """What an exported folder holds.

    `architecture` is the class of its model, and `auto_class` the one that loads it. `reason` is why no class of
    `transformers` equals the model, and `tokenizer_reason` why there is no tokenizer; None where there is."""

    architecture: str
    auto_class: str
    reason: str | None
    parameters: int
    tensors: int
    tokenizer_reason: str | None


class ExportedParts(NamedTuple):
    """The config of an exported model without special tokens, its tensors, and the contents of other JSON files."""

    config: Keywords
    tensors: dict[str, Tensor]
    other_files: Mapping[str, Any]


def export_model(
    model: Model,
    folder: str | Path,
    *,
    model_type: str | None = None,
    dtype: str = "float32",
    run_card: str | None = None,
) -> ExportReport:
    """Write a folder that `transformers` loads with the model's `AutoModel` class: weights, tokenizer, settings, card.

    It holds a class of `transformers` where one equals the recipe with these keywords, else a class of this library,
    which `trust_remote_code=True` or `import manyformer.conversion.hugging_face.auto_model` loads. `model_type`
    chooses among several families that equal a recipe, such as "roberta" for the recipe bert; by default it is the
    first that has its keywords. `dtype` is the type of the weights in the file, and `run_card` the card of a trained
    model. Raises UserError for a model of a kind that `transformers` has no `AutoModel` class for here, for one that
    is no `model_type`, for weights that `dtype` cannot hold, and for adapters and the like, which are merged first.
    """
    kind = auto_class_of(model)
    refuse_changed_modules(model, "exported")
    try:
        parts = _native_parts(model, kind, model_type)
        reason = None
    except UserError as error:
        # who names a type, or has no other class, wants the reason as the error
        if model_type is not None or not kind.is_wrapped:
            raise
        parts = _wrapped_parts(model)
        reason = str(error)
    # one tokenizer reads and writes, unless the model is one of two languages
    if isinstance(model.tokenizer, tuple):
        source, target = model.tokenizer
    else:
        source = model.tokenizer
        target = model.tokenizer
    # those of the tokenizer that writes
    special_tokens: Keywords = {}
    if kind.suffix != "ImageClassification":
        special_tokens = special_token_ids(target)
    generation: Keywords = generation_fields(model) or {}
    starts: Keywords = {
        name: generation[name] for name in ("decoder_start_token_id", "pad_token_id") if name in generation
    }
    config: Keywords = {**special_tokens, **parts.config, **starts, "dtype": dtype}
    tensors = {name: _converted(name, tensor, dtype) for name, tensor in parts.tensors.items()}
    with replacement_folder(Path(folder)) as draft:
        _write_model(draft, config, tensors, parts.other_files)
        if reason is not None:
            write_loader(draft)
        if generation:
            _write_json(draft / GENERATION, generation)
        tokenizer_reason = _write_tokenizer(draft, source, kind, model.max_length)
        if target is not source:
            make_folder(draft / TARGET_FOLDER)
            tokenizer_reason = tokenizer_reason or _write_tokenizer(
                draft / TARGET_FOLDER, target, kind, model.max_length
            )
        atomic_write_text(draft / "README.md", hub_card(model, kind, run_card, is_native=reason is None))
    parameters = sum(weight.numel() for weight in model.parameters())
    return ExportReport(
        config["architectures"][0], kind.auto_class, reason, parameters, len(parts.tensors), tokenizer_reason
    )


def _write_model(folder: Path, config: Keywords, tensors: dict[str, Tensor], other_files: Mapping[str, Any]) -> None:
    _write_json(folder / CONFIG, config)
    with atomic_path(folder / WEIGHTS) as file:
        save_file(tensors, str(file), metadata={"format": "pt"})
    for name, content in other_files.items():
        _write_json(folder / name, content)


def _converted(name: str, tensor: Tensor, dtype: str) -> Tensor:
    """A tensor in the type of the file. Raises UserError for a type that is none, or that cannot hold the numbers."""
    if dtype not in DTYPES:
        raise UserError(f"dtype ({dtype}) must be one of {', '.join(DTYPES)}")
    if not tensor.is_floating_point():
        return tensor
    converted = tensor.to(DTYPES[dtype])
    # a number that is not finite in the model already is the model's own
    if not converted.isfinite().all() and tensor.isfinite().all():
        raise UserError(f"{name} has numbers beyond those of {dtype}; bfloat16 holds them")
    return converted


def _write_json(file: Path, content: object) -> None:
    atomic_write_text(file, json_text(content, indent=2) + "\n")


def _native_parts(model: Model, kind: AutoClass, model_type: str | None) -> ExportedParts:
    """The parts of an equal class of `transformers`. Raises UserError if there is none."""
    keywords = _complete_keywords(model)
    family, family_config = _first_config(_families_of(model, model_type), keywords)
    config = {**family_config, SPEC_FIELD: spec_fields(model), **label_fields(model, kind)}
    own: dict[str, Tensor] = model.state_dict()
    tensors = {
        # a copy, because safetensors refuses tensors that share memory
        name: tensor.contiguous().clone()
        for rule in family.tensor_rules(keywords)
        for name, tensor in zip(rule.hf, rule.to_hf([own[part] for part in rule.ours]), strict=True)
    }
    return ExportedParts(config, tensors, family.other_files(keywords))


def _wrapped_parts(model: Model) -> ExportedParts:
    """The parts of a class of this library, with the names that the weights have in it; shared ones once."""
    own: dict[str, Tensor] = model.state_dict()
    tensors = {f"{PREFIX}{name}": own[name].contiguous() for name in stored_names(model)}
    # a model of two texts has a table for each of them
    other_files: dict[str, Keywords] = {}
    if auto_class_of(model).suffix == "ImageClassification":
        embed: Any = model.embed
        other_files = preprocessor_files(embed.shape, embed.pixel_scaling)
    return ExportedParts(config_fields(model), tensors, other_files)


def _write_tokenizer(folder: Path, tokenizer: Any, kind: AutoClass, max_length: int | None) -> str | None:
    """Write the files of a tokenizer; the reason where none is written."""
    if not isinstance(tokenizer, Tokenizer):
        return "the model was saved without a tokenizer"
    try:
        write_tokenizer(folder, tokenizer, kind, max_length)
    except UserError as error:
        return str(error)
    return None


def _families_of(model: Model, model_type: str | None) -> list[ModelFamily]:
    """The families that may equal a model. Raises UserError if there are none."""
    name = model.spec.recipe
    families = [family for family in all_families() if family.recipe == name]
    if not families:
        raise UserError(f"no class of transformers equals the recipe {name}")
    for keyword, reason in OF_OUR_OWN.items():
        if value := model.spec.keywords.get(keyword):
            raise UserError(f"{keyword} is {value}, and {reason}")
    if model_type is None:
        return families
    types = {known: family for family in families for known in family.model_types}
    if model_type not in types:
        raise UserError(f"no models of type {model_type!r} equal the recipe {name}; {suggest_names(model_type, types)}")
    return [types[model_type]]


def _first_config(families: Sequence[ModelFamily], keywords: Keywords) -> tuple[ModelFamily, Keywords]:
    """The first family that has a model with these keywords, and its config. Raises the error of the first if none."""
    # the first family is the recipe's usual one, so its reason is the one to give
    errors = []
    for family in families:
        try:
            return family, family.write_config(keywords)
        except UserError as error:
            errors.append(error)
    raise errors[0]


def _complete_keywords(model: Model) -> Keywords:
    """The keywords of a model with the id of padding, and the width of feed-forward layers that the recipe chose."""
    keywords = dict(model.spec.keywords)
    if isinstance(model.tokenizer, Tokenizer):
        keywords[PAD_ID] = model.tokenizer.pad
    else:
        keywords[PAD_ID] = 1
    # configs name the width that the recipe chose by itself
    if keywords.get("ff_dim", 0) is None:
        weights = model.state_dict()
        names = (".0.ff.inner.up.weight", ".0.ff.inner.experts.up.weight")
        name = next(name for name in weights if name.endswith(names))
        keywords["ff_dim"] = weights[name].shape[-2]
    return keywords


MESSAGE = "Export by manyformer"


def push_folder(folder: str | Path, name: str) -> str:
    """Upload a folder to the hub as the model `name`, private if it is new, with the user's own login.

    Returns the address. Raises UserError without the package that uploads, and where the hub does not take it."""
    try:
        return upload_folder(Path(folder), name, MESSAGE, leave_out=[MARK])
    except ImportError:
        raise UserError("--push needs the package huggingface_hub: pip install 'manyformer[hf]'") from None
    except RefusedByLibrary as error:
        problem = f"{folder} is written, but it could not be pushed to {name} on the hub"
        raise UserError(f"{problem}: {error}; the same command tries it again") from None


def hub_card(model: Model, kind: AutoClass, run_card: str | None, *, is_native: bool) -> str:
    """The card: the hub's fields, how the model is loaded, and `run_card`, that of a trained model with its scores.

    Without a `run_card` it has the recipe, its paper and the keywords."""
    options = "" if is_native else ", trust_remote_code=True"
    requirement = "It is loaded by the package manyformer (`pip install 'manyformer[hf]'`).\n\n"
    if is_native:
        requirement = ""
    return f"""---
library_name: transformers
pipeline_tag: {kind.pipeline}
tags:
- manyformer
- {model.spec.recipe}
---

{run_card or _recipe_card(model)}
## With transformers

{requirement}```python
from transformers import {kind.auto_class}

model = {kind.auto_class}.from_pretrained("this folder"{options})
```

Exported by manyformer {VERSION}.
"""


def _recipe_card(model: Model) -> str:
    """The recipe of a model that no run of this library trained."""
    card = get_recipe(model.spec.recipe).card
    parameters = sum(weight.numel() for weight in model.parameters())
    return f"""# {card.title}

{card.paper}. {card.summary}

The recipe `{card.name}` of manyformer, {parameters:,} parameters.

## Model settings

{model.spec.settings_list()}
"""
