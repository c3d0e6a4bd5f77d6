"""mLSTM: the matrix memory of xLSTM, with exponential input gates and a normalizer of its own."""

from typing import Annotated

import torch
from annotated_types import Gt

from manyformer.models import LanguageModel
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.attention.attention import Attention
from manyformer.nn.attention.output_stages import GatedNormStage, HeadGroupNorm
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward.feedforward import GatedFeedForward
from manyformer.nn.linear import ScaledFeatures
from manyformer.nn.linear.linear_kernel import LinearKernel
from manyformer.nn.linear.recurrent_rules import GateProjections, MatrixLSTMRule
from manyformer.nn.masks import Causal
from manyformer.nn.runtime.head_selection import HeadProjection
from manyformer.recipes.parts.baselines import rms_decoder
from manyformer.recipes.parts.keywords import HeadDim
from manyformer.recipes.parts.recurrent_layers import SIGNED_SUMS, RecurrentSizes
from manyformer.recipes.parts.registry import recipe

NORM_EPS = 1e-6


@recipe(
    "mLSTM",
    paper="Beck et al. 2024, xLSTM: Extended Long Short-Term Memory, arXiv:2405.04517; in the block of xLSTM 7B, Beck "
    "et al. 2025, arXiv:2503.13427",
    summary="A decayed memory matrix whose input gate is an exponential, so that one token can outweigh all before it.",
    task=LANGUAGE_MODELLING,
    family="linear",
    constant_state=True,
    cost="O(l d^2) per layer; O(d^2 / heads) per generated token, at any length",
    reasons=SIGNED_SUMS,
)
def mlstm(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 4,
    head_dim: HeadDim = None,
    ff_dim: int | None = None,
    gate_cap: Annotated[
        Annotated[float, Gt(0)] | None, "gates z become cap tanh(z / cap); null means unlimited"
    ] = 15.0,
    logit_cap: Annotated[float, Gt(0), "logits z become cap tanh(z / cap)"] = 30.0,
    dropout: float = 0.0,
) -> LanguageModel:
    """Section 2.3 in the block of xLSTM 7B (section 3): no convolution, LayerNorm and a sigmoid gate of each head.

    `head_dim` is the width of keys, dim / (2 heads) unless given; values have dim / heads. Matrices of the gates begin
    like all others instead of at 0. The sLSTM, whose gates read its last output, is not built."""
    sizes = RecurrentSizes.with_narrow_keys(dim, heads, head_dim)

    def layer(number: int) -> dict[str, Layer]:
        return {"attention": matrix_lstm_attention(sizes, gate_cap=gate_cap), "ff": GatedFeedForward(dim, ff_dim)}

    return rms_decoder(vocab, dim, depth, layer, dropout=dropout, logit_cap=logit_cap)


def matrix_lstm_attention(sizes: RecurrentSizes, *, gate_cap: float | None = 15.0) -> Attention:
    """xLSTM's layer with a matrix memory (section 2.3); gates z become cap tanh(z / cap)."""
    dim, heads, key_dim = sizes.dim, sizes.heads, sizes.head_dim
    # one number for each head and token, as both gates scale the whole matrix of a head's memory
    gates = GateProjections(input=HeadProjection(dim, heads, 1), forget=HeadProjection(dim, heads, 1))
    # C_t = f_t C_(t-1) + i_t v_t k_t^T with exponential input gates i_t; a sum of keys divides what is read
    rule = MatrixLSTMRule(heads, gates, gate_cap=gate_cap)
    kernel = LinearKernel(ScaledFeatures(key_dim**-0.5), Causal(), key_features=ScaledFeatures(), rule=rule)
    # a group for each head, whose memory has a scale of its own
    norm = HeadGroupNorm(heads, sizes.value_dim, heads, centred=True, eps=NORM_EPS)
    stage = GatedNormStage(norm, HeadProjection(dim, heads, sizes.value_dim), torch.sigmoid)
    return Attention(dim, heads, kernel, head_dim=key_dim, value_dim=sizes.value_dim, output_stage=stage, bias=False)
