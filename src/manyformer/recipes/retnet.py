"""RetNet: linear attention with rotary positions and a constant decay of each head."""

import math

from torch import nn

from manyformer.models import LanguageModel
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.attention.attention import Attention
from manyformer.nn.attention.output_stages import GatedNormStage, SharedHeadNorm
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward.feedforward import FeedForward
from manyformer.nn.linear import ScaledFeatures
from manyformer.nn.linear.decay_gates import FixedDecay
from manyformer.nn.linear.linear_kernel import LinearKernel
from manyformer.nn.linear.recurrent_rules import DecayRule
from manyformer.nn.masks import Causal
from manyformer.nn.positions import RotaryPosition
from manyformer.nn.runtime.head_selection import HeadProjection
from manyformer.recipes.parts.baselines import rms_decoder
from manyformer.recipes.parts.recurrent_layers import SIGNED_SUMS, RecurrentSizes
from manyformer.recipes.parts.registry import recipe


@recipe(
    "RetNet",
    paper="Sun et al. 2023, Retentive Network: A Successor to Transformer for Large Language Models, arXiv:2307.08621",
    summary="Retention: products of rotated queries and keys that decay with distance, at another rate in each head.",
    task=LANGUAGE_MODELLING,
    family="linear",
    constant_state=True,
    cost="O(l d^2) per layer; O(d^2 / heads) per generated token, at any length",
    reasons=SIGNED_SUMS,
)
def retnet(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 2,
    ff_dim: int | None = None,
    dropout: float = 0.0,
) -> LanguageModel:
    """Section 2: decays 1 - 2^(-5 - n) of head n, values twice as wide as keys, a norm of each head and a SiLU gate.

    `ff_dim` is 2 dim unless given. Angles are those of rotary positions, and norms before branches RMSNorm; the
    released code also divides decays and scores by sums that its norm of each head cancels."""
    sizes = RecurrentSizes.of(dim, heads, None)
    position = RotaryPosition(sizes.head_dim)

    def layer(number: int) -> dict[str, Layer]:
        ff = FeedForward(dim, ff_dim or 2 * dim, activation=nn.GELU())
        return {"attention": retention(sizes, position), "ff": ff}

    return rms_decoder(vocab, dim, depth, layer, dropout=dropout)


def retention(sizes: RecurrentSizes, position: RotaryPosition) -> Attention:
    """RetNet's layer (section 2): values have twice the width in `sizes`."""
    # S_n = gamma S_(n-1) + k_n^T v_n with twice as many columns as rows (section 2.1)
    value_dim = 2 * sizes.value_dim
    # the logarithm of 1 - 2^(-5 - n); log1p keeps its digits, of which 1 - 2^-12 has few left in float32
    decay = FixedDecay([math.log1p(-(2.0 ** (-5.0 - head))) for head in range(sizes.heads)])
    key_features = ScaledFeatures(sizes.head_dim**-0.5)
    kernel = LinearKernel(ScaledFeatures(), Causal(), key_features=key_features, rule=DecayRule(decay))
    # a norm without gains makes every head's output independent of its scale
    gate = HeadProjection(sizes.dim, sizes.heads, value_dim)
    stage = GatedNormStage(SharedHeadNorm(value_dim, learned=False), gate)
    return Attention(
        sizes.dim,
        sizes.heads,
        kernel,
        head_dim=sizes.head_dim,
        value_dim=value_dim,
        position=position,
        output_stage=stage,
        bias=False,
    )
