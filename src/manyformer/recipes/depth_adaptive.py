"""The depth-adaptive Transformer: a classifier after every layer, and a rule that foretells which one a token needs."""

from collections.abc import Mapping
from functools import partial
from typing import Literal

from torch import nn

from manyformer.attention import Attention
from manyformer.core import Layer
from manyformer.feedforward import FeedForward
from manyformer.kernels import SoftmaxKernel
from manyformer.masks import Causal
from manyformer.models import EncoderDecoder, LanguageModel
from manyformer.models.with_early_exit import (
    ClassifierSharing,
    EarlyExitConfig,
    ExitRuleName,
    ExitThresholds,
    ExitTraining,
    OracleName,
    with_early_exit,
)
from manyformer.position import SinusoidalPosition
from manyformer.recipes.early_exit import UNSURE
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import NormOrder
from manyformer.recipes.transformer import encoder_decoder
from manyformer.recipes.transformer_lm import gpt

ExitPredictorKind = Literal["none", "sequence", "multinomial", "geometric", "likeliest"]
TokenExitPredictorKind = Literal["none", "multinomial", "geometric", "likeliest"]

RULES: Mapping[str, ExitRuleName] = {
    "none": "never",
    "sequence": "sequence",
    "multinomial": "multinomial",
    "geometric": "geometric",
    "likeliest": "likeliest",
}

PAPER = "Elbayad et al. 2020, Depth-Adaptive Transformer, arXiv:1910.10073"
NEW = "Every layer can say the next word; a small classifier foretells after which one each word is said well enough."
COST = "O(l^2 d + l d^2) for each layer that a token passes; keys and values are made in all"


@recipe(
    "Depth-adaptive Transformer",
    paper=PAPER,
    summary=NEW,
    task="translation",
    causal=True,
    incremental_decoding=True,
    cross_attention=True,
    cost=COST,
    reasons={"float16": UNSURE, "bfloat16": UNSURE},
    tiny_keywords={"depth": 3},
)
def depth_adaptive_transformer(
    vocab: int = 10000,
    source_vocab: int | None = None,
    dim: int = 512,
    depth: int = 6,
    heads: int = 4,
    ff_dim: int | None = 1024,
    dropout: float = 0.3,
    norm_order: NormOrder = "post",
    predictor: ExitPredictorKind = "geometric",
    threshold: ExitThresholds = None,
    classifier_sharing: ClassifierSharing = "own",
    exit_training: ExitTraining = "aligned",
    mixed_samples: int = 1,
    oracle: OracleName = "correctness",
    smoothing: float = 1.0,
    layer_penalty: float = 0.01,
    exit_weight: float = 0.1,
) -> EncoderDecoder:
    """The model for IWSLT'14 by default, whose decoder is half as wide in the paper. Sections 3 and 4.

    Trained in two stages: with `predictor="none"`, where all classifiers learn and nobody leaves, and, begun with that
    run (`start`), with a predictor, which learns to leave where the `oracle` would, at `exit_weight` of the loss. Of
    thresholds "geometric" has one for all layers or one for each but the last (0.5), and "likeliest" (0.9).
    """
    model = encoder_decoder(
        vocab, source_vocab, dim, depth, heads, ff_dim, dropout, norm_order, position=partial(SinusoidalPosition, dim)
    )
    leaving = _leaving(
        predictor,
        threshold,
        classifier_sharing,
        exit_training,
        mixed_samples,
        oracle,
        smoothing,
        layer_penalty,
        exit_weight,
    )
    return with_early_exit(model, leaving)


@recipe(
    "Depth-adaptive Transformer (language model)",
    paper=PAPER,
    summary=NEW,
    task="language-model",
    causal=True,
    incremental_decoding=True,
    cost=COST,
    reasons={"cross_attention": "a language model reads one sequence only", "float16": UNSURE, "bfloat16": UNSURE},
    tiny_keywords={"depth": 3},
)
def depth_adaptive_lm(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    ff_dim: int | None = None,
    max_length: int = 1024,
    dropout: float = 0.1,
    norm_order: NormOrder = "pre",
    predictor: TokenExitPredictorKind = "geometric",
    threshold: ExitThresholds = None,
    classifier_sharing: ClassifierSharing = "shared",
    exit_training: ExitTraining = "aligned",
    mixed_samples: int = 1,
    oracle: OracleName = "correctness",
    smoothing: float = 1.0,
    layer_penalty: float = 0.01,
    exit_weight: float = 0.1,
) -> LanguageModel:
    """The decoder alone, as `transformer-lm`, where the paper translates; there is no source to foretell from."""

    def layer() -> dict[str, Layer]:
        ff = FeedForward(dim, ff_dim, activation=nn.GELU())
        return {"attention": Attention(dim, heads, SoftmaxKernel(Causal())), "ff": ff}

    model = gpt(vocab, dim, depth, max_length, layer, dropout=dropout, norm_order=norm_order)
    leaving = _leaving(
        predictor,
        threshold,
        classifier_sharing,
        exit_training,
        mixed_samples,
        oracle,
        smoothing,
        layer_penalty,
        exit_weight,
    )
    return with_early_exit(model, leaving)


def _leaving(
    predictor: ExitPredictorKind,
    threshold: ExitThresholds,
    classifiers: ClassifierSharing,
    training: ExitTraining,
    draws: int,
    oracle: OracleName,
    smoothing: float,
    penalty: float,
    exit_weight: float,
) -> EarlyExitConfig:
    """All layers count alike (section 3.1: uniform weights did best)."""
    return EarlyExitConfig(
        rule=RULES[predictor],
        threshold=threshold,
        classifier_sharing=classifiers,
        layer_weights="even",
        exit_training=training,
        mixed_samples=draws,
        oracle=oracle,
        smoothing=smoothing,
        layer_penalty=penalty,
        exit_weight=exit_weight,
    )
