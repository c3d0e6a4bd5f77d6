"""OLMo hybrid: three layers of the gated delta rule to one of softmax attention, whose norms follow its branches."""

from typing import Annotated

from annotated_types import Gt

from manyformer.base.errors import UserError
from manyformer.models import LanguageModel
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.attention.attention import Attention
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward.feedforward import GatedFeedForward
from manyformer.nn.masks import Causal
from manyformer.nn.positions import AllHeadsNorm, ComposedPosition, Position, RotaryPosition
from manyformer.nn.residual import AddJoin, Residual
from manyformer.nn.runtime.length_norms import RMSNorm
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.parts.baselines import LayerMaker, head_width, makers_of_pattern, rms_decoder
from manyformer.recipes.parts.keywords import (
    DeltaPattern,
    NegativeEigenvalues,
    NormEps,
    PositiveSize,
    ShortConvolutionSize,
    TiedOutput,
)
from manyformer.recipes.parts.recurrent_layers import RecurrentSizes, gated_delta_attention
from manyformer.recipes.parts.registry import recipe


@recipe(
    "OLMo hybrid",
    paper="Ai2 2026, the released models; layers of Yang et al. 2024, Gated Delta Networks: Improving Mamba2 with "
    "Delta Rule, arXiv:2412.06464, and OLMo 2, arXiv:2501.00656",
    summary="Three layers with a memory that can track parity, normed before, to one of softmax, normed after.",
    task=LANGUAGE_MODELLING,
    family="hybrid",
    cost="O(l^2 d) in one layer of four, O(l d^2) in the others",
    reasons={
        "attention_dropout": "layers of the delta rule form no weights of softmax",
        "convex_weights": "the memory of the delta rule is corrected, not averaged",
        "removable_heads": "queries and keys are normalized over all heads together",
    },
    tiny_keywords={"kv_heads": 1, "pattern": "LF", "delta_head_dim": 4, "delta_value_dim": 6},
)
def olmo_hybrid(
    vocab: int = 32000,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    kv_heads: int | None = None,
    ff_dim: int | None = None,
    pattern: DeltaPattern = "LLLF",
    delta_heads: Annotated[PositiveSize | None, "heads of layers of the delta rule; null means heads"] = None,
    delta_head_dim: Annotated[
        PositiveSize | None, "width of a head's queries and keys there; null means 3/4 dim / delta_heads"
    ] = None,
    delta_value_dim: Annotated[
        PositiveSize | None, "width of a head's values there; null means 2 delta_head_dim"
    ] = None,
    conv_size: ShortConvolutionSize = 4,
    rope_base: Annotated[
        Annotated[float, Gt(0)] | None,
        "base of the frequencies of rotary positions; null means no positions, as after an extension to long texts",
    ] = 500_000.0,
    *,
    negative_eigenvalues: NegativeEigenvalues = True,
    norm_eps: NormEps = 1e-6,
    tied: TiedOutput = False,
    dropout: float = 0.0,
) -> LanguageModel:
    """Smaller than published: 7B has dim=3840, depth=32, heads=30 and ff_dim=11008. `rope_base` is that of OLMo 2.

    Layers of the delta rule are pre-norm; those of attention are OLMo 2's: a norm of each branch's output instead, and
    queries and keys divided by their root mean square over all heads together. Raises UserError for a pattern with
    other letters, and for heads that do not divide dim."""
    width = head_width(dim, heads, None)
    count = delta_heads or heads
    key_dim = delta_head_dim or 3 * dim // (4 * count)
    if key_dim < 1:
        raise UserError(f"delta_head_dim is 3/4 dim / delta_heads, so dim ({dim}) is too small for {count} heads")
    sizes = RecurrentSizes(dim, count, key_dim, delta_value_dim or 2 * key_dim, count)
    max_strength = 2.0 if negative_eigenvalues else 1.0
    rotary = None if rope_base is None else RotaryPosition(width, pairs="halves", base=rope_base)

    def attention() -> Attention:
        position: Position = AllHeadsNorm(heads, kv_heads or heads, width, eps=norm_eps)
        if rotary is not None:
            position = ComposedPosition(position, rotary)
        return Attention(dim, heads, SoftmaxKernel(Causal()), kv_heads=kv_heads, position=position, bias=False)

    def normed_after(inner: Layer) -> Residual:
        return Residual(inner, inner_norm=RMSNorm(dim, norm_eps), join=AddJoin(dropout=dropout) if dropout else None)

    def delta_layer(number: int) -> dict[str, Layer]:
        # this norm alone has a small number of its own in the released code
        mixer = gated_delta_attention(sizes, conv_size=conv_size, max_strength=max_strength, norm_eps=1e-5)
        return {"attention": mixer, "ff": GatedFeedForward(dim, ff_dim)}

    def full_layer(number: int) -> dict[str, Layer]:
        return {"attention": normed_after(attention()), "ff": normed_after(GatedFeedForward(dim, ff_dim))}

    makers: dict[str, LayerMaker] = {"L": delta_layer, "F": full_layer}
    layers = makers_of_pattern(pattern, makers)
    return rms_decoder(vocab, dim, depth, layers, dropout=dropout, norm_eps=norm_eps, tied=tied)
