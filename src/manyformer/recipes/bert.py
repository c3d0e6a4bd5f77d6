"""BERT: an encoder trained to predict masked tokens."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal

from torch import nn

from manyformer.models import MaskedLM, TokenEmbedding
from manyformer.models.masked_lm import PartContrastiveLoss
from manyformer.models.tasks.masked_language_modelling import MASKED_LM
from manyformer.nn.attention.attention import Attention
from manyformer.nn.attention.global_summaries import SummaryTokens
from manyformer.nn.core import Layer
from manyformer.nn.positions import LearnedPosition, SentenceTypePosition
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.parts.baselines import gelu_layers, init_std, masked_lm
from manyformer.recipes.parts.keywords import NormEps, SentenceTypeCount
from manyformer.recipes.parts.registry import recipe

ENCODER_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu-tanh": partial(nn.GELU, "tanh"),
    "relu": nn.ReLU,
}

EncoderActivation = Annotated[
    Literal["gelu", "gelu-tanh", "relu"],
    "activation of feed-forward layers and of the head for masked tokens; gelu-tanh is an approximation of gelu",
]


@recipe(
    "BERT",
    paper="Devlin et al. 2019, BERT: Pre-training of Deep Bidirectional Transformers, arXiv:1810.04805",
    summary="Predicting masked tokens trains an encoder on the context of both sides at once.",
    task=MASKED_LM,
    family="softmax",
    cost="O(l^2 d + l d^2) per layer",
)
def bert(
    vocab: int = 30522,
    dim: int = 768,
    depth: int = 12,
    heads: int = 12,
    ff_dim: int | None = None,
    max_length: int = 512,
    sentence_types: SentenceTypeCount = None,
    dropout: float = 0.1,
    norm_eps: NormEps = 1e-12,
    activation: EncoderActivation = "gelu",
) -> MaskedLM:
    """BERT base by default: post-norm, GELU, learned positions, a normalized embedding, and a head with a dense layer.

    Section 3 and appendix A.2. `sentence_types` tell the first from the second text of a pair; they may be new in a run
    that begins with the weights of one without. The paper's `attention_dropout` is 0.1. Not included is the
    next-sentence task beside masked words, which Liu et al. (2019, arXiv:1907.11692) found not to help."""
    return masked_encoder(
        vocab,
        dim,
        depth,
        heads,
        ff_dim,
        dropout,
        max_length=max_length,
        sentence_types=sentence_types,
        norm_eps=norm_eps,
        make_activation=ENCODER_ACTIVATIONS[activation],
    )


def masked_encoder(
    vocab: int,
    dim: int,
    depth: int,
    heads: int,
    ff_dim: int | None,
    dropout: float,
    *,
    max_length: int | None = None,
    sentence_types: int | None = None,
    make_attention: Callable[[int], Layer] | None = None,
    summaries: SummaryTokens | None = None,
    contrast: PartContrastiveLoss | None = None,
    norm_eps: float = 1e-12,
    make_activation: Callable[[], nn.Module] = nn.GELU,
) -> MaskedLM:
    """BERT with attention from `make_attention`, given the layer's number from 0; without `max_length`, no positions.

    `sentence_types` is the number of vectors of sentences; `summaries` are prefixed to each text in all layers."""
    norm = partial(nn.LayerNorm, dim, eps=norm_eps)
    std = init_std(dim)
    position = None
    if max_length is not None:
        position = LearnedPosition(dim, max_length, std=std)
    types = None
    if sentence_types is not None:
        types = SentenceTypePosition(dim, sentence_types, std=std)
    # tokens, positions and sentences are summed, then normalized
    embed = TokenEmbedding(vocab, dim, position=position, types=types, std=std, norm=norm(), dropout=dropout)
    # no mask: every token attends to all others of its text
    make_attention = make_attention or (lambda number: Attention(dim, heads, SoftmaxKernel()))
    return masked_lm(
        embed,
        depth,
        gelu_layers(dim, ff_dim, make_attention, make_activation=make_activation),
        dropout=dropout,
        norm_order="post",
        norm=norm,
        summaries=summaries,
        contrast=contrast,
        make_activation=make_activation,
    )
