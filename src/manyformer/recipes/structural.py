"""An encoder whose positions are derived from a dependency tree."""

from collections.abc import Callable
from typing import Annotated, Literal

from manyformer.models import Tagger
from manyformer.models.tasks.tagging import TAGGING
from manyformer.nn.positions import (
    ComposedPosition,
    FusedTreePosition,
    NoPosition,
    Position,
    ShawPosition,
    SinusoidalPosition,
    TreeOffsetPosition,
)
from manyformer.recipes.parts.baselines import NormOrder
from manyformer.recipes.parts.keywords import MaxRelativeDistance
from manyformer.recipes.parts.registry import recipe
from manyformer.recipes.transformer import encoder

TreeAbsoluteKind = Annotated[
    Literal["none", "sequential", "fused"],
    "positions added to embeddings: none, token order (sequential), or order and tree depth (fused)",
]
TreeRelativeKind = Annotated[
    Literal["none", "sequential", "structural", "fused"],
    "positions in attention: none, token order (sequential), the dependency tree (structural), or both (fused)",
]


@recipe(
    "Structural positions",
    paper="Wang et al. 2019, Self-Attention with Structural Position Representations, arXiv:1909.00383",
    summary="A token's position is its depth in the sentence's dependency tree, and its path to other tokens there.",
    task=TAGGING,
    family="softmax",
    cost="O(l^2 d + l d^2) per layer",
    reasons={
        "incremental_decoding": "a sentence's tree is known only when the sentence is complete",
        "convex_weights": "positions are added to the values",
    },
    tiny_keywords={"max_relative_distance": 3},
)
def structural(
    vocab: int = 10000,
    classes: int = 37,
    dim: int = 256,
    depth: int = 4,
    heads: int = 4,
    ff_dim: int | None = None,
    max_relative_distance: MaxRelativeDistance = 16,
    absolute: TreeAbsoluteKind = "fused",
    relative: TreeRelativeKind = "fused",
    dropout: float = 0.1,
    norm_order: NormOrder = "pre",
) -> Tagger:
    """The paper's encoder as a tagger of words, where the paper translates; `ff_dim` is 4 dim unless given.

    `absolute` positions are added to embeddings: order alone ("sequential", as in the Transformer) or fused with depth.
    `relative` ones are added to keys and values: order ("sequential", Shaw et al. 2018), tree ("structural"), or both
    ("fused"); distances are clipped to `max_relative_distance`. "sequential" twice is the paper's baseline. Trees come
    with the data."""
    head_dim = dim // heads
    absolute_positions: dict[TreeAbsoluteKind, Callable[[], Position]] = {
        "none": NoPosition,
        "sequential": lambda: SinusoidalPosition(dim),
        "fused": lambda: FusedTreePosition(dim),
    }
    relative_positions: dict[TreeRelativeKind, Callable[[], Position]] = {
        "none": NoPosition,
        "sequential": lambda: ShawPosition(head_dim, max_relative_distance),
        "structural": lambda: TreeOffsetPosition(head_dim, max_relative_distance),
        "fused": lambda: ComposedPosition(
            ShawPosition(head_dim, max_relative_distance), TreeOffsetPosition(head_dim, max_relative_distance)
        ),
    }

    sizes = (vocab, classes, dim, depth, heads, ff_dim, dropout, norm_order)
    # makers, not modules: a table that is not chosen would draw random numbers and change all weights after it
    position = absolute_positions[absolute]()
    make_relative_position = relative_positions[relative]
    return encoder(Tagger, *sizes, position=position, make_relative_position=make_relative_position)
