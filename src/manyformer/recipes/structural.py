"""An encoder whose positions are places in a dependency tree."""

from collections.abc import Callable
from functools import partial
from typing import Literal

from torch import nn

from manyformer.attention import Attention
from manyformer.core import Layer
from manyformer.feedforward import FeedForward
from manyformer.kernels import Softmax
from manyformer.models import Embedding, Head, Tagger
from manyformer.position import Fused, NoPosition, Position, Shaw, Sinusoid, Structural, Together
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import NormOrder, stack

Absolute = Literal["none", "sequential", "fused"]
Relative = Literal["none", "sequential", "structural", "fused"]


@recipe(
    "Structural positions",
    paper="Wang et al. 2019, Self-Attention with Structural Position Representations, arXiv:1909.00383",
    new="A token's position is its depth in the sentence's dependency tree, and its way to others there.",
    task="tagging",
    cost="O(l^2 d + l d^2) per layer",
    because={
        "causal": "every token sees both sides",
        "streams": "a sentence's tree is known only when its last word is",
        "cross": "it reads one sequence only",
    },
    small={"clip": 3},
)
def structural(
    vocab: int = 10000,
    classes: int = 37,
    dim: int = 256,
    depth: int = 4,
    heads: int = 4,
    hidden: int | None = None,
    clip: int = 16,
    absolute: Absolute = "fused",
    relative: Relative = "fused",
    dropout: float = 0.1,
    norm: NormOrder = "pre",
) -> Tagger:
    """The paper's encoder with a label for every word, where the paper translates; `hidden` is 4 dim unless given.

    `absolute` positions are added to embeddings: order alone ("sequential", as in the Transformer) or fused with depth.
    `relative` ones are added to keys and values: order ("sequential", Shaw et al. 2018), tree ("structural"), or both
    ("fused"); distances are clipped to `clip`. "sequential" twice is the paper's baseline. Trees come with the data.
    """
    width = dim // heads
    absolutes: dict[Absolute, Callable[[], Position]] = {
        "none": NoPosition,
        "sequential": lambda: Sinusoid(dim),
        "fused": lambda: Fused(dim),
    }
    relatives: dict[Relative, Callable[[], Position]] = {
        "none": NoPosition,
        "sequential": lambda: Shaw(width, clip),
        "structural": lambda: Structural(width, clip),
        "fused": lambda: Together(Shaw(width, clip), Structural(width, clip)),
    }

    def layer() -> dict[str, Layer]:
        attention = Attention(dim, heads, Softmax(), position=relatives[relative]())
        return {"attention": attention, "ff": FeedForward(dim, hidden)}

    embed = Embedding(vocab, dim, position=absolutes[absolute](), scale=dim**0.5, dropout=dropout)
    body = stack(depth, layer, order=norm, norm=partial(nn.LayerNorm, dim), dropout=dropout)
    return Tagger(embed, body, Head(dim, classes, bias=True))
