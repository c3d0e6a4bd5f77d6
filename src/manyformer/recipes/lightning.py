"""Lightning attention: linear attention with constant decays of heads that weaken from layer to layer."""

import torch
from torch.nn import functional as F

from manyformer.models import LanguageModel
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.attention.attention import Attention
from manyformer.nn.attention.output_stages import GatedNormStage, HeadGroupNorm
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward.feedforward import GatedFeedForward
from manyformer.nn.linear import ScaledFeatures
from manyformer.nn.linear.decay_gates import FixedDecay
from manyformer.nn.linear.linear_kernel import LinearKernel
from manyformer.nn.linear.recurrent_rules import DecayRule
from manyformer.nn.masks import Causal
from manyformer.nn.runtime.head_selection import HeadProjection
from manyformer.recipes.parts.baselines import rms_decoder
from manyformer.recipes.parts.keywords import HeadDim
from manyformer.recipes.parts.recurrent_layers import SIGNED_SUMS, RecurrentSizes
from manyformer.recipes.parts.registry import recipe


@recipe(
    "Lightning attention",
    paper="Qin et al. 2024, Lightning Attention-2, arXiv:2401.04658; MiniMax 2025, MiniMax-01, arXiv:2501.08313",
    summary="SiLU of queries, keys and values, and a constant decay of each head, slower in higher layers.",
    task=LANGUAGE_MODELLING,
    family="linear",
    constant_state=True,
    cost="O(l d^2) per layer; O(d^2 / heads) per generated token, at any length",
    reasons={**SIGNED_SUMS, "removable_heads": "one norm acts on the outputs of all heads"},
)
def lightning(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 4,
    head_dim: HeadDim = None,
    ff_dim: int | None = None,
    dropout: float = 0.0,
) -> LanguageModel:
    """The recurrent layers of MiniMax-01 alone, which has softmax in every eighth layer, and experts.

    A norm over all heads, then a sigmoid gate; branches are normalized before, where MiniMax-01 sums scaled norms. Head
    n of h, counted from 1, decays by exp(-2^(-8 n / h)), to a power that falls from 1 to nearly 0 over the layers."""
    sizes = RecurrentSizes.of(dim, heads, head_dim, head_dim)

    def layer(number: int) -> dict[str, Layer]:
        return {"attention": lightning_attention(sizes, number, depth), "ff": GatedFeedForward(dim, ff_dim)}

    return rms_decoder(vocab, dim, depth, layer, dropout=dropout)


def lightning_attention(sizes: RecurrentSizes, number: int, depth: int) -> Attention:
    """The layer of lightning attention of a number, counted from 0, of `depth` layers, by which its decays go."""
    heads = sizes.heads
    # ALiBi's slopes as decays
    slopes = [2.0 ** (-8.0 / heads * head) for head in range(1, heads + 1)]
    # the released code's small numbers keep the top layer from a decay of exactly 1
    decay = FixedDecay([-slope * (1 - number / (depth - 1 + 1e-5) + 1e-5) for slope in slopes])
    kernel = LinearKernel(ScaledFeatures(activation=F.silu), Causal(), rule=DecayRule(decay, value_activation=F.silu))
    gate = HeadProjection(sizes.dim, heads, sizes.value_dim)
    # one group: the norm compares heads, of which those with slow decays sum over more tokens
    stage = GatedNormStage(HeadGroupNorm(heads, sizes.value_dim, 1, eps=1e-6), gate, torch.sigmoid)
    return Attention(
        sizes.dim,
        heads,
        kernel,
        head_dim=sizes.head_dim,
        value_dim=sizes.value_dim,
        output_stage=stage,
        bias=False,
    )
