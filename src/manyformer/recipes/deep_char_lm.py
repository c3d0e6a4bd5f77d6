"""The deep character language model: positions in every layer, and losses after every layer."""

from functools import partial

from torch import nn

from manyformer.models import ClassHead, LanguageModel
from manyformer.models.auxiliary_losses import LayerwiseNextTokenLoss
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.attention.attention import Attention
from manyformer.nn.core import Chain, Layer
from manyformer.nn.feed_forward.feedforward import FeedForward
from manyformer.nn.masks import Causal
from manyformer.nn.positions import LearnedPosition, PositionLayer
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.parts.baselines import NormOrder, branch, init_std, learned_embedding, stack
from manyformer.recipes.parts.registry import recipe


@recipe(
    "Deep character language model",
    paper="Al-Rfou et al. 2019, Character-Level Language Modeling with Deeper Self-Attention, arXiv:1808.04444",
    summary="Auxiliary losses in every layer, switched off from the lowest up, train 64 layers; each has its own "
    "positions.",
    task=LANGUAGE_MODELLING,
    family="softmax",
    cost="O(l^2 d + l d^2) per layer",
)
def deep_char_lm(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 12,
    heads: int = 2,
    ff_dim: int | None = None,
    max_length: int = 512,
    dropout: float = 0.1,
    norm_order: NormOrder = "post",
) -> LanguageModel:
    """The smaller of the two published models by default; the larger has `depth=64`. `ff_dim` is 4 dim unless given.

    Each layer below the last has classifiers for the next token and the one after it, which contribute to the loss
    until a layer-dependent fraction of training and are not used for prediction; the last layer keeps its classifier of
    the token after the next. The paper's dropout is 0.55, inside attention and feed-forward layers; here it is applied
    to their outputs."""
    layer_norm = partial(nn.LayerNorm, dim)
    std = init_std(dim)

    residual = partial(branch, order=norm_order, norm=layer_norm, dropout=dropout)

    def layer(number: int) -> Layer:
        attention = residual(Attention(dim, heads, SoftmaxKernel(Causal())))
        ff = residual(FeedForward(dim, ff_dim))
        # the positions of the first layer are in the embedding
        if number:
            positions = {"position": PositionLayer(LearnedPosition(dim, max_length, std=std))}
        else:
            positions = {}
        return Chain(**positions, attention=attention, ff=ff)

    # layer() returns complete layers: their branches have norms and dropout already
    body = stack(depth, layer, order=norm_order, norm=layer_norm, dropout=dropout)
    embed = learned_embedding(vocab, dim, max_length, dropout=dropout)
    # a classifier of a lower layer of a pre-norm stack needs the norm that the last layer's output gets
    targets = LayerwiseNextTokenLoss(dim, vocab, depth, norm=None if norm_order == "post" else layer_norm)
    return LanguageModel(embed, body, ClassHead(dim, vocab), auxiliary=targets)
