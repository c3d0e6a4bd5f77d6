"""A trained language model given a memory of very many old keys, or a larger one than it has."""

from typing import Any

from manyformer.core import tree_map
from manyformer.errors import UserError
from manyformer.models import LanguageModel, Model
from manyformer.recipes import build, get_recipe

MEMORIZING_RECIPE = "memorizing-transformer"

COUNTERPART_KEYWORDS: dict[str, dict[str, Any]] = {
    "transformer-xl": {"position": "xl", "scores": "product"},
    MEMORIZING_RECIPE: {},
}
"""The recipes whose models can be given a memory, and what they are then besides."""

GATE = 0.02


def memorize(
    model: Model,
    *,
    memory: int,
    layer: int | None = None,
    neighbours: int | None = None,
    block: int | None = None,
    gate: float = GATE,
) -> LanguageModel:
    """`model` with `memory` pairs of key and value to look up in one layer, and nothing else changed (Wu et al. 2022).

    It is a new `memorizing-transformer` with the old weights. The memory counts `gate` at first, so that the model
    begins near the old one; train it further to make use of the memory (section 4.4 of the paper; 20,000 steps there).
    Where there is a memory already it only changes its size, and `layer` and `gate` are as they were. What is not given
    is as in the model, or usual. Raises UserError for a recipe that remembers nothing of its own.
    """
    recipe, old = model.spec
    if recipe not in COUNTERPART_KEYWORDS:
        raise UserError(f"a {recipe} cannot be given a memory; a {' or a '.join(COUNTERPART_KEYWORDS)} can")
    if old["remembered"] is None:
        raise UserError("a memory of long ago is beside one of what was lately: set remembered")
    known = get_recipe(MEMORIZING_RECIPE).signature.parameters
    words = (
        {name: value for name, value in old.items() if name in known}
        | COUNTERPART_KEYWORDS[recipe]
        | {"memory": memory}
    )
    words |= {name: value for name, value in {"neighbours": neighbours, "block": block}.items() if value is not None}
    if old.get("memory") is None:
        words |= {"layer": layer, "gate": gate, "combine": "gate"}
    elif layer not in (None, old["layer"]):
        raise UserError(f"layer ({layer}): the memory that this model has stays in its layer")
    like = next(model.parameters())
    fresh = build(MEMORIZING_RECIPE, **words).to(device=like.device, dtype=like.dtype)
    kept = {name for name in fresh.state_dict() if ".combine." in name and old.get("memory") is None}
    missing = fresh.load_state_dict(tree_map(lambda t: t.detach().clone(), dict(model.state_dict())), strict=False)
    assert set(missing.missing_keys) == kept
    assert not missing.unexpected_keys
    fresh.tokenizer = model.tokenizer
    assert isinstance(fresh, LanguageModel)
    return fresh.train(model.training)
