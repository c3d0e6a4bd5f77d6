"""CALM: tokens exit at the first confident layer, with a calibrated guarantee for whole texts."""

from typing import Annotated, Literal

from manyformer.models import EncoderDecoder
from manyformer.models.tasks.translation import TRANSLATION
from manyformer.models.with_early_exit import EarlyExitConfig, with_early_exit
from manyformer.recipes.early_exit import (
    ROUNDING_CHANGES_EXITS,
    ClassifierSharingKeyword,
    HorizonKeyword,
    ThresholdDecayKeyword,
    ThresholdKeyword,
)
from manyformer.recipes.parts.baselines import NormOrder, encoder_decoder
from manyformer.recipes.parts.registry import recipe


@recipe(
    "CALM",
    paper="Schuster et al. 2022, Confident Adaptive Language Modeling, arXiv:2207.07061",
    summary="A confidence threshold for early exit, calibrated so that whole texts stay close to the full model's.",
    task=TRANSLATION,
    family="depth",
    cost="O(l^2 d + l d^2) for each layer that a token is computed in; keys and values are computed in all",
    reasons=ROUNDING_CHANGES_EXITS,
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
    confidence: Annotated[
        Literal["softmax", "saturation", "classifier"],
        "what the threshold applies to: a margin of probabilities, the similarity of successive hidden "
        "states, or a trained unit",
    ] = "softmax",
    threshold: ThresholdKeyword = None,
    threshold_decay: ThresholdDecayKeyword = 4.0,
    horizon: HorizonKeyword = 100,
    classifier_sharing: ClassifierSharingKeyword = "shared",
) -> EncoderDecoder:
    """About the size of the paper's T5 of 8 layers by default, as a plain Transformer. Section 3.

    All layers are trained to predict the next token, higher layers with larger weights. `confidence="classifier"` is a
    second stage that starts from a run of the first (`init_from`): everything else is frozen, and a unit learns at
    which layers the last layer would predict the same token. The threshold, 0.9 unless given, decays along `horizon`
    tokens, the longest output, by `threshold_decay`; null keeps it constant. `manyformer calibrate` certifies one."""
    # exits are the decoder's: the encoder runs once, for all tokens of the output
    model = encoder_decoder(vocab, source_vocab, dim, depth, heads, ff_dim, dropout, norm_order)
    config = EarlyExitConfig(
        rule=confidence,
        threshold=threshold,
        threshold_decay=threshold_decay,
        horizon=horizon,
        classifier_sharing=classifier_sharing,
        layer_weights="rising",
    )
    return with_early_exit(model, config)
