"""Conversion of a trained language model to one with a kNN memory of past keys, or with a larger one."""

from typing import Any

from manyformer.errors import UserError
from manyformer.models import LanguageModel, Model
from manyformer.models.generative_model import as_language_model
from manyformer.recipes import build, get_recipe

MEMORIZING_RECIPE = "memorizing-transformer"

COUNTERPART_KEYWORDS: dict[str, dict[str, Any]] = {
    "transformer-xl": {"position": "xl", "qk_similarity": "product"},
    MEMORIZING_RECIPE: {},
}
"""The recipes whose models can be given a memory, with the keywords that the converted model then needs."""

DEFAULT_GATE = 0.02


def memorize(
    model: Model,
    *,
    memory: int,
    layer: int | None = None,
    neighbours: int | None = None,
    block: int | None = None,
    gate: float = DEFAULT_GATE,
) -> LanguageModel:
    """Convert `model` so that one layer retrieves from a memory of `memory` key-value pairs (Wu et al. 2022).

    The result is a new `memorizing-transformer` with the weights of `model`. The memory's weight is `gate` at first, so
    that the new model starts close to the old one; train it further to use the memory (section 4.4 of the paper;
    20,000 steps there). If `model` has such a memory already, only its size changes, and `layer` and `gate` keep their
    values. Arguments that are None are taken from the model, else from the recipe's defaults. Raises UserError for a
    recipe without a segment memory.
    """
    recipe, old_keywords, _ = model.spec
    if recipe not in COUNTERPART_KEYWORDS:
        raise UserError(f"a {recipe} cannot be given a memory; a {' or a '.join(COUNTERPART_KEYWORDS)} can")
    if old_keywords["memory_length"] is None:
        raise UserError("a kNN memory needs a segment memory as well: set memory_length")
    valid_names = get_recipe(MEMORIZING_RECIPE).signature.parameters
    has_memory = old_keywords.get("knn_memory_size") is not None
    keywords = {name: value for name, value in old_keywords.items() if name in valid_names}
    keywords |= COUNTERPART_KEYWORDS[recipe] | {"knn_memory_size": memory}
    keywords |= {name: value for name, value in {"neighbours": neighbours, "block": block}.items() if value is not None}
    if not has_memory:
        keywords |= {"layer": layer, "gate": gate, "combine": "gate"}
    elif layer not in (None, old_keywords["layer"]):
        raise UserError(f"layer ({layer}) must be {old_keywords['layer']}, the layer that has the model's memory")
    parameter = next(model.parameters())
    memorizing = build(MEMORIZING_RECIPE, **keywords).to(device=parameter.device, dtype=parameter.dtype)
    load_result = memorizing.load_state_dict(model.state_dict(), strict=False)
    if has_memory:
        new_weights = set()
    else:
        new_weights = {name for name in memorizing.state_dict() if ".combine." in name}
    assert set(load_result.missing_keys) == new_weights
    assert not load_result.unexpected_keys
    memorizing.tokenizer = model.tokenizer
    return as_language_model(memorizing, "have a memory").train(model.training)
