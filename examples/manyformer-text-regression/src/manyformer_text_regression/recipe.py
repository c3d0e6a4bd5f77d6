"""The recipe `text-regression`: a Transformer encoder with one output."""

from functools import partial

from torch import nn

from manyformer.models import ClassHead, TokenEmbedding
from manyformer.nn import Attention, SoftmaxKernel
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward.feedforward import FeedForward
from manyformer.nn.positions import SinusoidalPosition
from manyformer.recipes import recipe
from manyformer.recipes.parts.baselines import stack
from manyformer_text_regression.model import TextRegressor
from manyformer_text_regression.task import TEXT_REGRESSION


@recipe(
    "Text regression",
    paper="none: an example of a task of one's own",
    summary="The mean of an encoder's outputs is projected to one number.",
    task=TEXT_REGRESSION,
    cost="O(l^2 d + l d^2) per layer",
)
def text_regression(
    vocab: int = 256, dim: int = 128, depth: int = 2, heads: int = 4, dropout: float = 0.0
) -> TextRegressor:
    """An encoder with sinusoids, mean pooling and one output."""

    def layer(number: int) -> dict[str, Layer]:
        return {"attention": Attention(dim, heads, SoftmaxKernel()), "ff": FeedForward(dim)}

    embed = TokenEmbedding(vocab, dim, position=SinusoidalPosition(dim), scale=dim**0.5, dropout=dropout)
    body = stack(depth, layer, order="pre", norm=partial(nn.LayerNorm, dim), dropout=dropout)
    return TextRegressor(embed, body, ClassHead(dim, 1, bias=True))
