"""The Synthesizer: attention weights that are not products of queries and keys."""

import math
from collections.abc import Callable
from typing import Annotated, Literal, get_args

from torch import nn

from manyformer.models import LanguageModel
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward.feedforward import FeedForward
from manyformer.nn.masks import Causal, Mask
from manyformer.nn.token_mixing import FactorizedPairs, PairTable
from manyformer.nn.token_mixing.synthesizer_attention import (
    DenseScores,
    DotProductScores,
    FactorizedDenseScores,
    FixedScores,
    SynthesizerAttention,
    SynthesizerScores,
)
from manyformer.recipes.parts.baselines import NormOrder, language_model, learned_embedding
from manyformer.recipes.parts.registry import recipe

ScoreKindName = Annotated[
    Literal[
        "dense",
        "random",
        "frozen",
        "factorized-dense",
        "factorized-random",
        "random+dense",
        "dense+dot",
        "random+dot",
        "factorized-dense+dot",
        "factorized-random+dot",
    ],
    "source of the attention scores: the query (dense), positions alone (random), query and key (dot), or a mix",
]
SCORE_KINDS: tuple[str, ...] = get_args(get_args(ScoreKindName)[0])
RANK = 8
"""The rank of a factorized table (section 3.3 of the paper)."""


@recipe(
    "Synthesizer",
    paper="Tay et al. 2021, Synthesizer: Rethinking Self-Attention in Transformer Models, arXiv:2005.00743",
    summary="Attention weights are computed from the query alone, or are learned numbers independent of the tokens.",
    task=LANGUAGE_MODELLING,
    family="mixing",
    cost="O(l^2 d + l d^2) per layer",
    reasons={"attention_dropout": "weights are synthesized, in a layer of its own"},
)
def synthesizer(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    ff_dim: int | None = None,
    max_length: int = 1024,
    score_kind: ScoreKindName = "random+dot",
    dropout: float = 0.0,
    norm_order: NormOrder = "pre",
) -> LanguageModel:
    """Sections 3.1 to 3.4; else as `transformer-lm`. `score_kind` is how attention scores are computed.

    "dense": from the query alone; "random": a learned number for each pair of positions, "frozen" if drawn once and not
    trained; both also "factorized"; "dot": products of queries and keys. Kinds joined by + are mixed with learned
    weights, "random+dot" being the paper's best."""

    def layer(number: int) -> dict[str, Layer]:
        return {
            # values and the output projection are those of attention; only scores are made otherwise
            "mixer": synthesized_attention(score_kind, dim, heads, max_length, Causal()),
            "ff": FeedForward(dim, ff_dim, activation=nn.GELU()),
        }

    embed = learned_embedding(vocab, dim, max_length, dropout=dropout)
    return language_model(embed, depth, layer, dropout=dropout, norm_order=norm_order)


def synthesized_attention(score_kind: str, dim: int, heads: int, max_length: int, mask: Mask) -> SynthesizerAttention:
    """Attention with scores of one of `SCORE_KINDS`."""
    return SynthesizerAttention(
        dim, [SCORES[name](dim, heads, max_length) for name in score_kind.split("+")], mask=mask
    )


def _glorot_std(max_length: int) -> float:
    """Glorot's deviation, at which attention weights start nearly equal."""
    return 1 / math.sqrt(max_length)


SCORES: dict[str, Callable[[int, int, int], SynthesizerScores]] = {
    "dense": DenseScores,
    "random": lambda dim, heads, longest: FixedScores(PairTable(longest, heads=heads, std=_glorot_std(longest))),
    # untrained scores must distinguish positions from the start
    "frozen": lambda dim, heads, longest: FixedScores(PairTable(longest, heads=heads, std=1.0, trainable=False)),
    "factorized-dense": FactorizedDenseScores,
    "factorized-random": lambda dim, heads, longest: FixedScores(
        FactorizedPairs(longest, RANK, heads=heads, std=_glorot_std(longest))
    ),
    "dot": lambda dim, heads, longest: DotProductScores(dim, heads),
}
