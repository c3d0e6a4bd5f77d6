"""The DA-Transformer: an encoder whose attention multiplies scores by a learned function of the distance."""

from manyformer.models import TextClassifier
from manyformer.models.tasks.text_labels import CLASSIFICATION
from manyformer.nn.positions import DistanceAwarePosition
from manyformer.recipes.parts.baselines import NormOrder
from manyformer.recipes.parts.registry import recipe
from manyformer.recipes.transformer import encoder


@recipe(
    "DA-Transformer",
    paper="Wu et al. 2021, DA-Transformer: Distance-aware Transformer, arXiv:2010.06925",
    summary="Each head learns how real distances scale attention scores, instead of encoding positions.",
    task=CLASSIFICATION,
    family="softmax",
    cost="O(l^2 d + l d^2) per layer",
    reasons={
        "learns": "its distances have no direction, so a text and its reverse give the same output, and the toy task "
        "needs order"
    },
)
def da_transformer(
    vocab: int = 8000,
    classes: int = 2,
    dim: int = 256,
    depth: int = 4,
    heads: int = 4,
    ff_dim: int | None = None,
    dropout: float = 0.1,
    norm_order: NormOrder = "pre",
) -> TextClassifier:
    """An encoder whose only positions are distances inside attention; `ff_dim` is 4 dim unless given.

    Section 3: a slope and a limit for each head. Everything else is as in `transformer-classifier`, for comparison."""
    sizes = (vocab, classes, dim, depth, heads, ff_dim, dropout, norm_order)
    return encoder(TextClassifier, *sizes, make_relative_position=lambda: DistanceAwarePosition(heads))
