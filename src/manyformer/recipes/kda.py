"""Kimi Delta Attention: the gated delta rule with a decay of each key channel."""

from manyformer.models import LanguageModel
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.attention.attention import Attention
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward.feedforward import GatedFeedForward
from manyformer.recipes.parts.baselines import rms_decoder
from manyformer.recipes.parts.keywords import HeadDim, ShortConvolutionSize
from manyformer.recipes.parts.recurrent_layers import (
    CORRECTED_MEMORY,
    ChannelDecayParts,
    RecurrentSizes,
    delta_attention,
)
from manyformer.recipes.parts.registry import recipe


@recipe(
    "Kimi Delta Attention",
    paper="Kimi Team 2025, Kimi Linear: An Expressive, Efficient Attention Architecture, arXiv:2510.26692",
    summary="Gated DeltaNet whose decay differs between the channels of a key, so that each can have its own memory "
    "length.",
    task=LANGUAGE_MODELLING,
    family="linear",
    constant_state=True,
    cost="O(l d^2) per layer; O(d^2 / heads) per generated token, at any length",
    reasons=CORRECTED_MEMORY,
)
def kda(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 4,
    head_dim: HeadDim = None,
    ff_dim: int | None = None,
    conv_size: ShortConvolutionSize = 4,
    dropout: float = 0.0,
) -> LanguageModel:
    """Its recurrent layers alone: Kimi Linear has a layer of latent attention after three of them, and experts.

    Decay and output gate are products of two matrices with `head_dim` channels between them, the gate a sigmoid.
    `head_dim` is also the width of values."""
    sizes = RecurrentSizes.of(dim, heads, head_dim, head_dim)

    def layer(number: int) -> dict[str, Layer]:
        return {"attention": kimi_delta_attention(sizes, conv_size=conv_size), "ff": GatedFeedForward(dim, ff_dim)}

    return rms_decoder(vocab, dim, depth, layer, dropout=dropout)


def kimi_delta_attention(sizes: RecurrentSizes, *, conv_size: int = 4, norm_eps: float = 1e-5) -> Attention:
    """The layer of Kimi Delta Attention (section 3): a decay of each channel of a key, and a sigmoid gate."""
    decay, decay_projection, stage = ChannelDecayParts.of(sizes, norm_eps)
    return delta_attention(sizes, (decay, decay_projection), stage, conv_size=conv_size)
