"""The Transformer encoder as a classifier."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch import nn

from manyformer.attention import Attention
from manyformer.core import Layer
from manyformer.feedforward import FeedForward
from manyformer.kernels import SoftmaxKernel
from manyformer.models import ClassHead, TextClassifier, TokenEmbedding
from manyformer.models.encoder_model import EncoderModel
from manyformer.position import NoPosition, Position, SinusoidalPosition
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import NormOrder, stack
from manyformer.tasks.text_labels import CLASSIFICATION

EncoderT = TypeVar("EncoderT", bound=EncoderModel[Any])


@recipe(
    "Transformer classifier",
    paper="Vaswani et al. 2017, arXiv:1706.03762 (encoder); Reimers and Gurevych 2019, arXiv:1908.10084 (mean pooling)",
    summary="The mean of the encoder's outputs represents the whole text.",
    task=CLASSIFICATION,
    cost="O(l^2 d + l d^2) per layer",
)
def transformer_classifier(
    vocab: int = 8000,
    classes: int = 2,
    dim: int = 256,
    depth: int = 4,
    heads: int = 4,
    ff_dim: int | None = None,
    dropout: float = 0.1,
    norm_order: NormOrder = "pre",
) -> TextClassifier:
    """An encoder with sinusoids, mean pooling and one projection; `ff_dim` is 4 dim unless given."""
    return encoder(
        TextClassifier, vocab, classes, dim, depth, heads, ff_dim, dropout, norm_order, position=SinusoidalPosition(dim)
    )


def encoder(
    model_class: Callable[[TokenEmbedding, Layer, ClassHead], EncoderT],
    vocab: int,
    classes: int,
    dim: int,
    depth: int,
    heads: int,
    ff_dim: int | None,
    dropout: float,
    norm_order: NormOrder,
    *,
    position: Position | None = None,
    make_relative_position: Callable[[], Position] = NoPosition,
) -> EncoderT:
    """An encoder with one projection, `position` added to its embedding, and relative positions in its attention."""

    def layer(number: int) -> dict[str, Layer]:
        attention = Attention(dim, heads, SoftmaxKernel(), position=make_relative_position())
        return {"attention": attention, "ff": FeedForward(dim, ff_dim)}

    embed = TokenEmbedding(vocab, dim, position=position, scale=dim**0.5, dropout=dropout)
    body = stack(depth, layer, order=norm_order, norm=partial(nn.LayerNorm, dim), dropout=dropout)
    return model_class(embed, body, ClassHead(dim, classes, bias=True))
