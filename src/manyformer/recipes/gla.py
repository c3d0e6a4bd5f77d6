"""Gated linear attention: a memory that decays each key channel by a gate of the input."""

from typing import Annotated

from manyformer.models import LanguageModel
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.attention.attention import Attention
from manyformer.nn.attention.output_stages import GatedNormStage, SharedHeadNorm
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward.feedforward import GatedFeedForward
from manyformer.nn.linear import ScaledFeatures
from manyformer.nn.linear.decay_gates import SigmoidDecay
from manyformer.nn.linear.linear_kernel import LinearKernel
from manyformer.nn.linear.recurrent_rules import DecayRule
from manyformer.nn.masks import Causal
from manyformer.nn.runtime.head_selection import HeadProjection
from manyformer.recipes.parts.baselines import rms_decoder
from manyformer.recipes.parts.keywords import HeadDim, PositiveSize
from manyformer.recipes.parts.recurrent_layers import SIGNED_SUMS, RecurrentSizes
from manyformer.recipes.parts.registry import recipe


@recipe(
    "Gated Linear Attention",
    paper="Yang et al. 2023, Gated Linear Attention Transformers with Hardware-Efficient Training, arXiv:2312.06635",
    summary="Linear attention without a normalizer, whose memory decays each key channel by a gate of the input.",
    task=LANGUAGE_MODELLING,
    family="linear",
    constant_state=True,
    cost="O(l d^2) per layer; O(d^2 / heads) per generated token, at any length",
    reasons=SIGNED_SUMS,
)
def gla(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 4,
    head_dim: HeadDim = None,
    ff_dim: int | None = None,
    gate_rank: Annotated[PositiveSize, "channels between the two matrices of the decay's projection"] = 16,
    dropout: float = 0.0,
) -> LanguageModel:
    """Section 4: decays sigmoid(gate)^(1/16), keys of half the width of values, a norm and a SiLU gate of the output.

    `head_dim` is the width of keys, dim / (2 heads) unless given; values have dim / heads."""
    sizes = RecurrentSizes.with_narrow_keys(dim, heads, head_dim)

    def layer(number: int) -> dict[str, Layer]:
        attention = gated_linear_attention(sizes, gate_rank=gate_rank)
        return {"attention": attention, "ff": GatedFeedForward(dim, ff_dim)}

    return rms_decoder(vocab, dim, depth, layer, dropout=dropout)


def gated_linear_attention(sizes: RecurrentSizes, *, gate_rank: int = 16) -> Attention:
    """The layer of gated linear attention (section 4), a decay of each channel of a key by a gate of low rank."""
    dim, heads, key_dim = sizes.dim, sizes.heads, sizes.head_dim
    # one decay for each channel of a key; of low rank, because a full matrix would cost as much as the keys'
    rule = DecayRule(SigmoidDecay(key_dim), HeadProjection(dim, heads, key_dim, rank=gate_rank, bias=True))
    # S_t = diag(a_t) S_(t-1) + k_t^T v_t, read by q_t / sqrt(e)
    kernel = LinearKernel(ScaledFeatures(key_dim**-0.5), Causal(), key_features=ScaledFeatures(), rule=rule)
    stage = GatedNormStage(SharedHeadNorm(sizes.value_dim), HeadProjection(dim, heads, sizes.value_dim))
    return Attention(dim, heads, kernel, head_dim=key_dim, value_dim=sizes.value_dim, output_stage=stage, bias=False)
