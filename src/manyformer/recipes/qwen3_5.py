"""Qwen3.5: three layers of the gated delta rule to one of gated softmax attention, with dense feed-forward layers."""

from functools import partial

from manyformer.models import LanguageModel
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward.feedforward import GatedFeedForward
from manyformer.recipes.parts.baselines import LayerMaker, head_width, makers_of_pattern, rms_decoder
from manyformer.recipes.parts.keywords import (
    DeltaHeads,
    DeltaKeyDim,
    DeltaKeyHeads,
    DeltaPattern,
    DeltaValueDim,
    HeadDim,
    NormEps,
    QuarterRotatedDim,
    RopeBase,
    ShortConvolutionSize,
    TiedOutput,
)
from manyformer.recipes.parts.recurrent_layers import RecurrentSizes
from manyformer.recipes.parts.registry import recipe
from manyformer.recipes.qwen3_next import gated_hybrid_mixers


@recipe(
    "Qwen3.5",
    paper="the released text models of 2026; the layers are those of Yang et al. 2024, Gated Delta Networks: Improving "
    "Mamba2 with Delta Rule, arXiv:2412.06464, and Qiu et al. 2025, arXiv:2505.06708",
    summary="Qwen3-Next without experts: three layers with a corrected memory to one that attends to all tokens.",
    task=LANGUAGE_MODELLING,
    family="hybrid",
    cost="O(l^2 d) in one layer of four, O(l d^2) in the others",
    reasons={
        "attention_dropout": "layers of the delta rule form no weights of softmax",
        "convex_weights": "the memory of the delta rule is corrected, not averaged",
        "removable_heads": "heads of the delta rule share keys",
    },
    tiny_keywords={
        "kv_heads": 1,
        "pattern": "LF",
        "delta_heads": 4,
        "delta_key_heads": 2,
        "delta_head_dim": 4,
        "delta_value_dim": 6,
    },
)
def qwen3_5(
    vocab: int = 32000,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    kv_heads: int | None = 2,
    head_dim: HeadDim = None,
    rotated_dim: QuarterRotatedDim = None,
    ff_dim: int | None = None,
    pattern: DeltaPattern = "LLLF",
    delta_heads: DeltaHeads = 8,
    delta_key_heads: DeltaKeyHeads = 4,
    delta_head_dim: DeltaKeyDim = 64,
    delta_value_dim: DeltaValueDim = 64,
    conv_size: ShortConvolutionSize = 4,
    rope_base: RopeBase = 1e7,
    *,
    norm_eps: NormEps = 1e-6,
    tied: TiedOutput = False,
    dropout: float = 0.0,
) -> LanguageModel:
    """The text part, smaller than published: 9B has dim=4096, depth=32, heads=16, kv_heads=4, head_dim=256.

    It has ff_dim=12288, delta_heads=32 and delta_key_heads=16 of 128 channels. The models with experts are
    `qwen3-next`, whose layers these are; images, and the prediction of tokens further ahead, are not part of the
    recipe. Raises UserError for a pattern with other letters, and for heads that do not fit."""
    mixers = gated_hybrid_mixers(
        RecurrentSizes(dim, delta_heads, delta_head_dim, delta_value_dim, delta_key_heads),
        heads,
        kv_heads,
        head_width(dim, heads, head_dim),
        rotated_dim,
        conv_size=conv_size,
        rope_base=rope_base,
        norm_eps=norm_eps,
    )

    def layer(number: int, letter: str) -> dict[str, Layer]:
        return {"attention": mixers[letter](), "ff": GatedFeedForward(dim, ff_dim)}

    makers: dict[str, LayerMaker] = {letter: partial(layer, letter=letter) for letter in mixers}
    layers = makers_of_pattern(pattern, makers)
    return rms_decoder(vocab, dim, depth, layers, dropout=dropout, norm_eps=norm_eps, tied=tied)
