"""CALM: each word is said after the layer at which the model is sure of it, with a guarantee for the whole text."""

from functools import partial
from typing import Literal

from manyformer.models import EncoderDecoder
from manyformer.models.with_early_exit import ClassifierSharing, EarlyExitConfig, ExitThresholds, with_early_exit
from manyformer.position import SinusoidalPosition
from manyformer.recipes.early_exit import UNSURE
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import NormOrder
from manyformer.recipes.transformer import encoder_decoder


@recipe(
    "CALM",
    paper="Schuster et al. 2022, Confident Adaptive Language Modeling, arXiv:2207.07061",
    summary="A threshold of confidence, calibrated so that whole texts stay near the full model's, tells when to stop.",
    task="translation",
    causal=True,
    incremental_decoding=True,
    cross_attention=True,
    cost="O(l^2 d + l d^2) for each layer that a token passes; keys and values are made in all",
    reasons={"float16": UNSURE, "bfloat16": UNSURE},
    tiny_keywords={"depth": 3, "threshold": 0.05},
)
def calm(
    vocab: int = 32128,
    source_vocab: int | None = None,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    ff_dim: int | None = 1024,
    dropout: float = 0.1,
    norm_order: NormOrder = "pre",
    confidence: Literal["softmax", "saturation", "classifier"] = "softmax",
    threshold: ExitThresholds = None,
    threshold_decay: float | None = 4.0,
    horizon: int = 100,
    classifier_sharing: ClassifierSharing = "shared",
) -> EncoderDecoder:
    """About the size of the paper's T5 of 8 layers by default, as a plain Transformer. Section 3.

    All layers learn to say the next word, the more the higher. `confidence="classifier"` is a second stage, begun with
    a run of the first (`start`): all else is frozen, and a unit learns where the last layer would say the same. The
    threshold, 0.9 until `manyformer calibrate` finds one, falls along `horizon` tokens, the longest output, by
    `threshold_decay`; null keeps it.
    """
    model = encoder_decoder(
        vocab, source_vocab, dim, depth, heads, ff_dim, dropout, norm_order, position=partial(SinusoidalPosition, dim)
    )
    leaving = EarlyExitConfig(
        rule=confidence,
        threshold=threshold,
        threshold_decay=threshold_decay,
        horizon=horizon,
        classifier_sharing=classifier_sharing,
        layer_weights="rising",
    )
    return with_early_exit(model, leaving)
