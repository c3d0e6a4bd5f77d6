"""The depth-adaptive Transformer: a classifier after every layer, and a rule that foretells which one a token needs."""

from collections.abc import Mapping
from functools import partial
from typing import Literal

from torch import nn

from manyformer.attention import Attention
from manyformer.core import Layer
from manyformer.feedforward import FeedForward
from manyformer.kernels import Softmax
from manyformer.masks import Causal
from manyformer.models import EncoderDecoder, LanguageModel
from manyformer.position import Sinusoid
from manyformer.recipes.early_exit import UNSURE
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import NormOrder
from manyformer.recipes.transformer import encoder_decoder
from manyformer.recipes.transformer_lm import gpt
from manyformer.recipes.wrapping import Classifiers, Leaving, OracleName, RuleName, Thresholds, Training, wrap

Predictor = Literal["none", "sequence", "multinomial", "geometric", "likeliest"]
TokenPredictor = Literal["none", "multinomial", "geometric", "likeliest"]

RULES: Mapping[str, RuleName] = {
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
    new=NEW,
    task="translation",
    causal=True,
    streams=True,
    cross=True,
    cost=COST,
    because={"float16": UNSURE, "bfloat16": UNSURE},
    small={"depth": 3},
)
def depth_adaptive_transformer(
    vocab: int = 10000,
    source_vocab: int | None = None,
    dim: int = 512,
    depth: int = 6,
    heads: int = 4,
    hidden: int | None = 1024,
    dropout: float = 0.3,
    norm: NormOrder = "post",
    predictor: Predictor = "geometric",
    threshold: Thresholds = None,
    classifiers: Classifiers = "own",
    training: Training = "aligned",
    draws: int = 1,
    oracle: OracleName = "correctness",
    smoothing: float = 1.0,
    penalty: float = 0.01,
    exit_weight: float = 0.1,
) -> EncoderDecoder:
    """The model for IWSLT'14 by default, whose decoder is half as wide in the paper. Sections 3 and 4.

    Trained in two stages: with `predictor="none"`, where all classifiers learn and nobody leaves, and, begun with that
    run (`start`), with a predictor, which learns to leave where the `oracle` would, at `exit_weight` of the loss. Of
    thresholds "geometric" has one for all layers or one for each but the last (0.5), and "likeliest" (0.9).
    """
    model = encoder_decoder(
        vocab, source_vocab, dim, depth, heads, hidden, dropout, norm, position=partial(Sinusoid, dim)
    )
    leaving = _leaving(predictor, threshold, classifiers, training, draws, oracle, smoothing, penalty, exit_weight)
    return wrap(model, leaving)


@recipe(
    "Depth-adaptive Transformer (language model)",
    paper=PAPER,
    new=NEW,
    task="language-model",
    causal=True,
    streams=True,
    cost=COST,
    because={"cross": "a language model reads one sequence only", "float16": UNSURE, "bfloat16": UNSURE},
    small={"depth": 3},
)
def depth_adaptive_lm(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    hidden: int | None = None,
    longest: int = 1024,
    dropout: float = 0.1,
    norm: NormOrder = "pre",
    predictor: TokenPredictor = "geometric",
    threshold: Thresholds = None,
    classifiers: Classifiers = "shared",
    training: Training = "aligned",
    draws: int = 1,
    oracle: OracleName = "correctness",
    smoothing: float = 1.0,
    penalty: float = 0.01,
    exit_weight: float = 0.1,
) -> LanguageModel:
    """The decoder alone, as `transformer-lm`, where the paper translates; there is no source to foretell from."""

    def layer() -> dict[str, Layer]:
        ff = FeedForward(dim, hidden, activation=nn.GELU())
        return {"attention": Attention(dim, heads, Softmax(Causal())), "ff": ff}

    model = gpt(vocab, dim, depth, longest, layer, dropout=dropout, norm=norm)
    leaving = _leaving(predictor, threshold, classifiers, training, draws, oracle, smoothing, penalty, exit_weight)
    return wrap(model, leaving)


def _leaving(
    predictor: Predictor,
    threshold: Thresholds,
    classifiers: Classifiers,
    training: Training,
    draws: int,
    oracle: OracleName,
    smoothing: float,
    penalty: float,
    exit_weight: float,
) -> Leaving:
    """All layers count alike (section 3.1: uniform weights did best)."""
    return Leaving(
        rule=RULES[predictor],
        threshold=threshold,
        classifiers=classifiers,
        layer_weights="even",
        training=training,
        draws=draws,
        oracle=oracle,
        smoothing=smoothing,
        penalty=penalty,
        exit_weight=exit_weight,
    )
