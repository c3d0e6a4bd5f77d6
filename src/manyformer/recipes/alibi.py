"""ALiBi: a language model without positions, in which distance costs, so that it reads further than it was taught."""

from functools import partial

from torch import nn

from manyformer.attention import Attention
from manyformer.core import Layer
from manyformer.feedforward import FeedForward
from manyformer.kernels import Softmax
from manyformer.masks import Causal
from manyformer.models import Embedding, Head, LanguageModel
from manyformer.position import Alibi
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import NormOrder, shrink_outputs, small_std, stack


@recipe(
    "ALiBi",
    paper="Press et al. 2022, Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation, "
    "arXiv:2108.12409",
    new="A penalty that grows with distance takes the place of positions, and longer texts than in training are read.",
    task="language-model",
    causal=True,
    streams=True,
    cost="O(l^2 d + l d^2) per layer",
    because={"cross": "a language model reads one sequence only"},
)
def alibi(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    hidden: int | None = None,
    dropout: float = 0.0,
    norm: NormOrder = "pre",
) -> LanguageModel:
    """`transformer-lm` with biases instead of learned positions, and so without a longest sequence. Section 3.

    The paper changes nothing but the position in the models it compares; which model that is, is not its matter: ours
    is `transformer-lm`, theirs that of Baevski and Auli (2019) with 16 layers of width 1024.
    """
    # without weights, so that one part serves all layers
    position = Alibi(heads)

    def layer() -> dict[str, Layer]:
        return {
            "attention": Attention(dim, heads, Softmax(Causal()), position=position),
            "ff": FeedForward(dim, hidden, activation=nn.GELU()),
        }

    std = small_std(dim)
    embed = Embedding(vocab, dim, std=std, dropout=dropout)
    body = stack(depth, layer, order=norm, norm=partial(nn.LayerNorm, dim), dropout=dropout)
    shrink_outputs(body, depth, std=std)
    return LanguageModel(embed, body, Head(dim, vocab, tied=embed.token))
