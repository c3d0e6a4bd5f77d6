"""The recipe `stick-breaking`: a language model with stick-breaking attention and no positions."""

from functools import partial

from torch import nn

from manyformer.models import ClassHead, LanguageModel, TokenEmbedding
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn import Attention
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward.feedforward import GatedFeedForward
from manyformer.recipes import recipe
from manyformer.recipes.parts.baselines import init_std, stack
from manyformer_stick_breaking.kernel import StickBreakingKernel


@recipe(
    "Stick-breaking attention",
    paper="Tan et al. 2024, Scaling Stick-Breaking Attention: An Efficient Implementation and In-depth Study, "
    "arXiv:2410.17980",
    summary="Each query breaks its weights off a stick, from the nearest earlier token to the farthest, so that no "
    "positions are needed.",
    task=LANGUAGE_MODELLING,
    cost="O(l^2 d + l d^2) per layer",
)
def stick_breaking(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    kv_heads: int | None = None,
    ff_dim: int | None = None,
    dropout: float = 0.0,
) -> LanguageModel:
    """A pre-norm model with RMS norms and gated feed-forward layers, for texts of any length."""

    def layer(number: int) -> dict[str, Layer]:
        return {
            "attention": Attention(dim, heads, StickBreakingKernel(), kv_heads=kv_heads),
            "ff": GatedFeedForward(dim, ff_dim),
        }

    std = init_std(dim)
    embed = TokenEmbedding(vocab, dim, std=std, dropout=dropout)
    body = stack(depth, layer, order="pre", norm=partial(nn.RMSNorm, dim), dropout=dropout, std=std)
    return LanguageModel(embed, body, ClassHead(dim, vocab, tied=embed.token))
