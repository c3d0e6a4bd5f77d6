"""The widths of recurrent layers, and the attention of DeltaNet and its successors, and of Mamba-2."""

from typing import NamedTuple

import torch

from manyformer.nn.attention.attention import Attention
from manyformer.nn.attention.output_stages import GatedNormStage, HeadGroupNorm, OutputStage, SharedHeadNorm
from manyformer.nn.convolution.depthwise_convolution import ShortConvolution
from manyformer.nn.linear import ScaledFeatures, UnitLengthFeatures
from manyformer.nn.linear.decay_gates import DecayGate, SoftplusDecay
from manyformer.nn.linear.delta_rules import EraseWriteRule, FeedbackDeltaRule
from manyformer.nn.linear.linear_kernel import LinearKernel
from manyformer.nn.linear.memory_rules import MemoryRule
from manyformer.nn.linear.recurrent_rules import GatedDeltaRule, GateProjections, StateSpaceRule
from manyformer.nn.masks import Causal
from manyformer.nn.recurrent.delta_product import DeltaProductAttention
from manyformer.nn.runtime.head_selection import HeadProjection
from manyformer.recipes.parts.baselines import check_heads

SIGNED_SUMS = {
    "attention_dropout": "weights are products of any sign, not those of softmax",
    "convex_weights": "weights are products of any sign, which nothing divides by their sum",
}
"""What does not hold of recipes whose memory is a decayed sum, and why."""
CORRECTED_MEMORY = {
    "attention_dropout": "a memory forms no weights of softmax",
    "convex_weights": "the memory is corrected, not averaged",
    "attention_maps": "the memory is corrected, so that no weights of pairs of tokens exist",
}
"""What does not hold of recipes whose memory follows the delta rule, and why."""


class RecurrentSizes(NamedTuple):
    """The widths of a recurrent layer: of the stream, and of the heads' queries and keys, and values."""

    dim: int
    heads: int
    head_dim: int
    value_dim: int
    key_heads: int

    @classmethod
    def of(
        cls, dim: int, heads: int, head_dim: int | None, value_dim: int | None = None, key_heads: int | None = None
    ) -> "RecurrentSizes":
        """The widths that are not None, and dim / heads for the others. Raises UserError if heads must divide dim."""
        if head_dim is None or value_dim is None:
            check_heads(dim, heads)
        return cls(dim, heads, head_dim or dim // heads, value_dim or dim // heads, key_heads or heads)

    @classmethod
    def with_narrow_keys(
        cls, dim: int, heads: int, head_dim: int | None, value_dim: int | None = None
    ) -> "RecurrentSizes":
        """Keys of `head_dim` channels, by default half of the width of values, which have dim / heads by default."""
        sizes = cls.of(dim, heads, head_dim, value_dim)
        return sizes._replace(head_dim=head_dim or max(1, sizes.value_dim // 2))

    @property
    def convolved(self) -> int:
        """The number of channels of queries, keys and values together."""
        return 2 * self.key_heads * self.head_dim + self.heads * self.value_dim


def delta_attention(
    sizes: RecurrentSizes,
    decay: tuple[DecayGate, HeadProjection] | None,
    output_stage: OutputStage,
    *,
    conv_size: int,
    max_strength: float = 1.0,
) -> Attention:
    """Attention by the delta rule, gated by `decay` and its projection, over convolved queries and keys of length 1.

    Yang et al. 2024 (arXiv:2406.06484), section 3.3."""
    strength = HeadProjection(sizes.dim, sizes.heads, 1)
    if decay is None:
        # S_t = S_(t-1) (I - beta k k^T) + beta v k^T: the value stored under k is replaced by v, to the share beta
        rule = GatedDeltaRule(None, GateProjections(strength=strength), max_strength=max_strength)
    else:
        projections = GateProjections(decay=decay[1], strength=strength)
        # the same after the decay: S_t = a_t S_(t-1) (I - beta k k^T) + beta v k^T
        rule = GatedDeltaRule(decay[0], projections, max_strength=max_strength)
    return corrected_attention(sizes, rule, output_stage, conv_size=conv_size)


def corrected_attention(
    sizes: RecurrentSizes, rule: MemoryRule, output_stage: OutputStage, *, conv_size: int
) -> Attention:
    """Attention by a rule that corrects its memory, over convolved queries, keys and values, the first two of length 1.

    Queries are divided by sqrt(head_dim) as well."""
    # keys of length 1 make I - beta k k^T a contraction for beta up to 2
    features = UnitLengthFeatures(sizes.head_dim**-0.5)
    key_features = UnitLengthFeatures()
    return Attention(
        sizes.dim,
        sizes.heads,
        LinearKernel(features, Causal(), key_features=key_features, rule=rule),
        key_heads=sizes.key_heads,
        head_dim=sizes.head_dim,
        value_dim=sizes.value_dim,
        short_convolution=ShortConvolution(sizes.convolved, conv_size),
        output_stage=output_stage,
        bias=False,
    )


def gated_delta_attention(
    sizes: RecurrentSizes, *, conv_size: int = 4, max_strength: float = 1.0, norm_eps: float = 1e-5
) -> Attention:
    """Gated DeltaNet's layer: a decay of each head, and a SiLU gate of each head's normalized output.

    Yang et al. 2024 (arXiv:2412.06464), section 3.4."""
    decay = SoftplusDecay(sizes.heads), HeadProjection(sizes.dim, sizes.heads, 1)
    gate = HeadProjection(sizes.dim, sizes.heads, sizes.value_dim)
    stage = GatedNormStage(SharedHeadNorm(sizes.value_dim, eps=norm_eps), gate)
    return delta_attention(sizes, decay, stage, conv_size=conv_size, max_strength=max_strength)


class ChannelDecayParts(NamedTuple):
    """What Kimi Delta Attention has around its rule: decays of the channels of keys, and a sigmoid gate of outputs.

    Kimi Team 2025 (arXiv:2510.26692)."""

    decay: SoftplusDecay
    decay_projection: HeadProjection
    output_stage: GatedNormStage

    @classmethod
    def of(cls, sizes: RecurrentSizes, norm_eps: float = 1e-5) -> "ChannelDecayParts":
        """The parts for layers of these sizes; projections are products of two matrices."""
        # what decays and gates cost is then small beside queries, keys and values
        rank = sizes.head_dim
        # a decay of each channel of a key, where Gated DeltaNet has one of each head
        decay = SoftplusDecay(sizes.heads, sizes.head_dim)
        decay_projection = HeadProjection(sizes.dim, sizes.heads, sizes.head_dim, rank=rank)
        gate = HeadProjection(sizes.dim, sizes.heads, sizes.value_dim, rank=rank)
        # a sigmoid instead of the SiLU of Gated DeltaNet, which the report's ablation prefers
        stage = GatedNormStage(SharedHeadNorm(sizes.value_dim, eps=norm_eps), gate, torch.sigmoid)
        return cls(decay, decay_projection, stage)


def erase_write_attention(sizes: RecurrentSizes, *, conv_size: int = 4, max_strength: float = 1.0) -> Attention:
    """Gated DeltaNet-2's layer: Kimi Delta Attention's with a gate of each channel that is erased, or written.

    Hatamizadeh et al. 2026 (arXiv:2605.22791)."""
    decay, decay_projection, stage = ChannelDecayParts.of(sizes)
    erase = HeadProjection(sizes.dim, sizes.heads, sizes.head_dim)
    write = HeadProjection(sizes.dim, sizes.heads, sizes.value_dim)
    projections = GateProjections(decay=decay_projection, erase=erase, write=write)
    widths = {"key_dim": sizes.head_dim, "value_dim": sizes.value_dim}
    rule = EraseWriteRule(decay, projections, **widths, max_strength=max_strength)
    return corrected_attention(sizes, rule, stage, conv_size=conv_size)


def feedback_attention(sizes: RecurrentSizes, *, conv_size: int = 4, initial_correction: float = 1.0) -> Attention:
    """Comba's layer: Gated DeltaNet's with weaker keys in corrections, of the memory and of queries.

    Hu et al. 2025 (arXiv:2506.02475)."""
    decay, strength = (HeadProjection(sizes.dim, sizes.heads, 1) for _ in range(2))
    projections = GateProjections(decay=decay, strength=strength)
    rule = FeedbackDeltaRule(sizes.heads, projections, correction=initial_correction)
    gate = HeadProjection(sizes.dim, sizes.heads, sizes.value_dim)
    stage = GatedNormStage(SharedHeadNorm(sizes.value_dim), gate)
    return corrected_attention(sizes, rule, stage, conv_size=conv_size)


def delta_product_attention(
    sizes: RecurrentSizes, steps: int, *, conv_size: int = 4, max_strength: float = 2.0
) -> DeltaProductAttention:
    """Gated DeltaProduct's layer: Gated DeltaNet's with `steps` keys and values of each head for a token.

    Siems et al. 2025 (arXiv:2502.10297), section 3."""
    gate = HeadProjection(sizes.dim, sizes.heads, sizes.value_dim)
    return DeltaProductAttention(
        sizes.dim,
        sizes.heads,
        steps=steps,
        head_dim=sizes.head_dim,
        value_dim=sizes.value_dim,
        conv_size=conv_size,
        max_strength=max_strength,
        output_stage=GatedNormStage(SharedHeadNorm(sizes.value_dim), gate),
    )


def state_space_attention(
    sizes: RecurrentSizes, *, conv_size: int = 4, normalized: bool = True, norm_eps: float = 1e-5
) -> Attention:
    """Mamba-2's layer: h_t = exp(A dt_t) h_(t-1) + dt_t B_t x_t^T and y_t = C_t h_t + D x_t, gated, then normalized.

    Dao and Gu 2024 (arXiv:2405.21060), section 7. B are keys, C queries, both of `head_dim` channels, x values.
    `key_heads` groups of heads share them, and a norm; without `normalized` there is the gate alone (Falcon-H1)."""
    rule = StateSpaceRule(sizes.heads, HeadProjection(sizes.dim, sizes.heads, 1))
    norm = None
    if normalized:
        norm = HeadGroupNorm(sizes.heads, sizes.value_dim, sizes.key_heads, eps=norm_eps)
    gate = HeadProjection(sizes.dim, sizes.heads, sizes.value_dim)
    return Attention(
        sizes.dim,
        sizes.heads,
        LinearKernel(ScaledFeatures(), Causal(), rule=rule),
        # B and C, the keys and queries, are shared by the heads of a group, like keys in grouped attention
        key_heads=sizes.key_heads,
        head_dim=sizes.head_dim,
        value_dim=sizes.value_dim,
        # over the channels of C, B and x, which pass the same convolution
        short_convolution=ShortConvolution(sizes.convolved, conv_size, bias=True),
        output_stage=GatedNormStage(norm, gate, gate_first=True),
        bias=False,
    )
