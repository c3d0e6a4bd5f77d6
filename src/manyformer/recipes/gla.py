"""Gated linear attention: a memory that decays each key channel by a gate of the input."""

from typing import Annotated

from manyformer.attention import Attention
from manyformer.attention.output_stages import GatedNormStage, SharedHeadNorm
from manyformer.core import Layer
from manyformer.feedforward import GatedFeedForward
from manyformer.head_selection import HeadProjection
from manyformer.kernels import LinearKernel
from manyformer.kernels.decay_gates import SigmoidDecay
from manyformer.kernels.features import ScaledFeatures
from manyformer.kernels.recurrent_rules import DecayRule
from manyformer.masks import Causal
from manyformer.models import LanguageModel
from manyformer.recipes.baselines import rms_decoder
from manyformer.recipes.keywords import HeadDim, PositiveSize
from manyformer.recipes.recurrent_layers import SIGNED_SUMS, RecurrentSizes
from manyformer.recipes.registry import recipe
from manyformer.tasks.language_modelling import LANGUAGE_MODELLING


@recipe(
    "Gated Linear Attention",
    paper="Yang et al. 2023, Gated Linear Attention Transformers with Hardware-Efficient Training, arXiv:2312.06635",
    summary="Linear attention without a normalizer, whose memory decays each key channel by a gate of the input.",
    task=LANGUAGE_MODELLING,
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
    sizes = RecurrentSizes.of(dim, heads, None)
    if head_dim is None:
        key_dim = max(1, sizes.value_dim // 2)
    else:
        key_dim = head_dim

    def layer(number: int) -> dict[str, Layer]:
        # one decay for each channel of a key; of low rank, because a full matrix would cost as much as the keys'
        rule = DecayRule(SigmoidDecay(key_dim), HeadProjection(dim, heads, key_dim, rank=gate_rank, bias=True))
        # S_t = diag(a_t) S_(t-1) + k_t^T v_t, read by q_t / sqrt(e)
        kernel = LinearKernel(ScaledFeatures(key_dim**-0.5), Causal(), key_features=ScaledFeatures(), rule=rule)
        gate = HeadProjection(dim, heads, sizes.value_dim)
        stage = GatedNormStage(SharedHeadNorm(sizes.value_dim), gate)
        attention = Attention(dim, heads, kernel, head_dim=key_dim, output_stage=stage, bias=False)
        return {"attention": attention, "ff": GatedFeedForward(dim, ff_dim)}

    return rms_decoder(vocab, dim, depth, layer, dropout=dropout)
