"""The Transformer encoder as a classifier."""

from functools import partial

from torch import nn

from manyformer.attention import Attention
from manyformer.core import Layer
from manyformer.feedforward import FeedForward
from manyformer.kernels import SoftmaxKernel
from manyformer.models import ClassHead, TextClassifier, TokenEmbedding
from manyformer.position import SinusoidalPosition
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import NormOrder, stack
from manyformer.tasks.classification import CLASSIFICATION


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

    def layer(number: int) -> dict[str, Layer]:
        return {"attention": Attention(dim, heads, SoftmaxKernel()), "ff": FeedForward(dim, ff_dim)}

    embed = TokenEmbedding(vocab, dim, position=SinusoidalPosition(dim), scale=dim**0.5, dropout=dropout)
    body = stack(depth, layer, order=norm_order, norm=partial(nn.LayerNorm, dim), dropout=dropout)
    return TextClassifier(embed, body, ClassHead(dim, classes, bias=True))
