"""The Transformer encoder as a classifier."""

from functools import partial

from torch import nn

from manyformer.attention import Attention
from manyformer.core import Layer
from manyformer.feedforward import FeedForward
from manyformer.kernels import Softmax
from manyformer.models import Classifier, Embedding, Head
from manyformer.position import Sinusoid
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import NormOrder, stack


@recipe(
    "Transformer classifier",
    paper="Vaswani et al. 2017, arXiv:1706.03762 (encoder); Reimers and Gurevych 2019, arXiv:1908.10084 (mean pooling)",
    new="The encoder's mean over tokens is a vector for the whole text.",
    task="classification",
    cost="O(l^2 d + l d^2) per layer",
    because={
        "causal": "a label may depend on the whole text",
        "streams": "a later token changes all earlier outputs, so nothing can be kept",
        "cross": "it reads one sequence only",
    },
)
def transformer_classifier(
    vocab: int = 8000,
    classes: int = 2,
    dim: int = 256,
    depth: int = 4,
    heads: int = 4,
    hidden: int | None = None,
    dropout: float = 0.1,
    norm: NormOrder = "pre",
) -> Classifier:
    """An encoder with sinusoids, mean pooling and one projection; `hidden` is 4 dim unless given."""

    def layer() -> dict[str, Layer]:
        return {"attention": Attention(dim, heads, Softmax()), "ff": FeedForward(dim, hidden)}

    embed = Embedding(vocab, dim, position=Sinusoid(dim), scale=dim**0.5, dropout=dropout)
    body = stack(depth, layer, order=norm, norm=partial(nn.LayerNorm, dim), dropout=dropout)
    return Classifier(embed, body, Head(dim, classes, bias=True))
