"""Layers that predict further tokens than the next one, as keywords of recipes."""

from collections.abc import Callable, Mapping
from typing import Annotated, Literal

from annotated_types import Ge
from torch import nn

from manyformer.base.errors import UserError
from manyformer.models import LanguageModel
from manyformer.models.ahead import AheadLoss, ParallelAhead, SequentialAhead, SharedAhead
from manyformer.nn.core import Layer
from manyformer.recipes.parts.baselines import LayerMakers, scale_residual_init
from manyformer.recipes.parts.keywords import PositiveSize

AheadKind = Annotated[
    Literal["none", "sequential", "parallel", "shared"],
    "tokens after the next one are predicted by a chain of layers (DeepSeek-V3), by parallel layers (Gloeckle et al. "
    "2024), by the logits of the next one (shared), or not",
]
AheadTokens = Annotated[PositiveSize | None, "number of tokens predicted after the next one; null means 1"]
AheadWeight = Annotated[
    Annotated[float, Ge(0)] | None,
    "weight of the mean of the losses of tokens after the next one; null means 0.3, and 0 trains as without them",
]

DEFAULT_TOKENS = 1
DEFAULT_WEIGHT = 0.3
"""That of most of the training of DeepSeek-V3 (section 4.2), which ends with 0.1."""


def add_ahead_layers(
    model: LanguageModel,
    makers: LayerMakers,
    complete: Callable[[Mapping[str, Layer] | Layer], Layer],
    make_norm: Callable[[], nn.Module],
    *,
    depth: int,
    ahead: AheadKind,
    ahead_tokens: AheadTokens,
    ahead_weight: AheadWeight,
    std: float | None = None,
) -> LanguageModel:
    """The model with layers that predict tokens after the next one, in place: those that follow its `depth` layers.

    They are made after the model, whose initial weights are those without them. `makers` and `std` are those of
    `stack`, and `complete` makes a layer of what a maker returns. Raises UserError for settings without `ahead`."""
    if ahead == "none":
        for name, value in (("ahead_tokens", ahead_tokens), ("ahead_weight", ahead_weight)):
            if value is not None:
                raise UserError(f"{name} ({value}) is that of tokens after the next one: set ahead, which is none")
        return model
    tokens = DEFAULT_TOKENS if ahead_tokens is None else ahead_tokens
    weight = DEFAULT_WEIGHT if ahead_weight is None else ahead_weight
    loss: AheadLoss
    if ahead == "shared":
        loss = SharedAhead(tokens, weight)
    else:
        in_turn = [makers] if callable(makers) else makers
        numbers = range(depth, depth + tokens)
        blocks = [complete(in_turn[number % len(in_turn)](number)) for number in numbers]
        if ahead == "parallel":
            loss = ParallelAhead(blocks, [make_norm() for _ in blocks], weight)
        else:
            dim = model.embed.token.embedding_dim
            loss = SequentialAhead(dim, blocks, [[make_norm() for _ in range(3)] for _ in blocks], weight)
    if std is not None:
        scale_residual_init(loss, depth, std=std)
    model.set_head(model.head, loss)
    return model
