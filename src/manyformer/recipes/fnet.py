"""FNet: an encoder that mixes tokens by a Fourier transform."""

from functools import partial
from typing import Annotated, Literal

from torch import nn

from manyformer.models import MaskedLM, TokenEmbedding
from manyformer.models.tasks.masked_language_modelling import MASKED_LM
from manyformer.nn.attention.attention import Attention
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward.feedforward import FeedForward
from manyformer.nn.positions import LearnedPosition, SentenceTypePosition
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.nn.token_mixing import FourierMixer, LinearMixer
from manyformer.recipes.parts.baselines import branch, init_std, masked_lm
from manyformer.recipes.parts.keywords import PositiveSize, SentenceTypeCount
from manyformer.recipes.parts.registry import recipe

TokenMixingName = Annotated[
    Literal["fourier", "linear", "random", "none"],
    "what mixes tokens: a Fourier transform, two learned or two random matrices, or nothing (feed-forward layers only)",
]


@recipe(
    "FNet",
    paper="Lee-Thorp et al. 2021, FNet: Mixing Tokens with Fourier Transforms, arXiv:2105.03824",
    summary="A Fourier transform without weights mixes tokens nearly as well as attention.",
    task=MASKED_LM,
    family="mixing",
    cost="O(l log(l) d + l d^2) per layer",
    reasons={
        "causal": "a Fourier transform sums over all tokens, including later ones",
        "heads": "a Fourier transform mixes tokens; `attention_layers` alone have heads",
        "attention_dropout": "a Fourier transform has no weights of softmax",
        "attention_maps": "a Fourier transform has no weights to show",
    },
)
def fnet(
    vocab: int = 32000,
    dim: int = 768,
    depth: int = 12,
    ff_dim: int | None = None,
    max_length: int = 512,
    attention_layers: Annotated[PositiveSize | None, "number of topmost layers with attention; null means none"] = None,
    heads: int = 12,
    dropout: float = 0.1,
    mixing: TokenMixingName = "fourier",
    sentence_types: SentenceTypeCount = None,
) -> MaskedLM:
    """FNet base by default: `bert` without its attention, and a projection of the token embeddings; sections 3 and 4.1.

    `attention_layers` makes the paper's FNet-Hybrid: that many of the topmost layers have attention, with `heads`. The
    paper pads all rows to one length and transforms the padding as well; here each document is transformed at its own
    length. `mixing` are the variants that the paper compares (section 4.1): "linear", "random" and feed-forward only
    ("none"). The released models have four `sentence_types`. GELU is the exact one. Not included is the next-sentence
    task."""
    norm = partial(nn.LayerNorm, dim, eps=1e-12)
    std = init_std(dim)
    position = LearnedPosition(dim, max_length, std=std)
    # the projection follows the norm, as in the published code, where embeddings may be narrower than the stream
    embedding_projection = nn.Sequential(norm(), nn.Linear(dim, dim))
    types = None
    if sentence_types is not None:
        types = SentenceTypePosition(dim, sentence_types, std=std)
    embed = TokenEmbedding(
        vocab, dim, position=position, types=types, std=std, norm=embedding_projection, dropout=dropout
    )

    def layer(number: int) -> dict[str, Layer]:
        ff = FeedForward(dim, ff_dim, activation=nn.GELU())
        # the hybrid has attention at the top, where the paper found it to help most (appendix)
        if number >= depth - (attention_layers or 0):
            return {"mixer": Attention(dim, heads, SoftmaxKernel()), "ff": ff}
        if mixing == "none":
            return {"ff": ff}
        # the transform has no dropout in the paper
        mixer = FourierMixer() if mixing == "fourier" else LinearMixer(dim, max_length, trainable=mixing == "linear")
        return {"mixer": branch(mixer, order="post", norm=norm), "ff": ff}

    return masked_lm(embed, depth, layer, dropout=dropout, norm_order="post", norm=norm)
