"""Models of this library inside classes of `transformers`: the family that reads their folders back."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from manyformer.errors import UserError
from manyformer.interop.foreign_config import MODEL_TYPE, SPEC_FIELD, ForeignConfig
from manyformer.interop.model_family import ConfigRule, ModelFamily, TensorRule, same
from manyformer.keyword_checks import checked_keywords
from manyformer.models import Model
from manyformer.recipes import build, recipe_in_file

PREFIX = "model."
"""What the names of tensors begin with."""


def stored_names(model: Model) -> list[str]:
    """The names of a model's weights, of shared ones the first."""
    first_names: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first_names.setdefault(id(tensor), name)
    return list(first_names.values())


def wrapped_family(config: ForeignConfig) -> ModelFamily:
    """The family of the only model that a config of this library describes.

    Raises UserError for a recipe that does not exist, and for keywords that are none of it."""
    spec = config.part(SPEC_FIELD)
    recipe = spec.content.get("recipe")
    saved_keywords = spec.part("keywords").content
    if not isinstance(recipe, str):
        raise UserError(f"{config.file}: {SPEC_FIELD}.recipe ({recipe!r:.60}) must be the name of a recipe")
    signature = recipe_in_file(recipe, config.file).signature
    try:
        checked_keywords(recipe, saved_keywords, signature)
    except UserError as error:
        raise UserError(f"{config.file}: {error}") from None

    def tensor_rules(keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
        with torch.device("meta"):
            names = stored_names(build(recipe, **saved_keywords))
        return (same(f"{PREFIX}{name}", name) for name in names)

    return ModelFamily(
        title="manyformer",
        model_types=(MODEL_TYPE,),
        recipe=recipe,
        prefix=PREFIX,
        config_rules=(ConfigRule(lambda config: saved_keywords, dict),),
        tensor_rules=tensor_rules,
    )
