"""gMLP: feed-forward layers whose gates look along the sequence, as a language model and as an encoder."""

from functools import partial
from typing import Literal

from torch import nn

from manyformer.attention import Attention
from manyformer.core import Chain, Layer
from manyformer.kernels import SoftmaxKernel
from manyformer.masks import AllKeys, Causal, Mask
from manyformer.mixers import PairTable, PositionPairs, SpatialGate, ToeplitzPairs
from manyformer.models import ClassHead, LanguageModel, MaskedLM, TokenEmbedding
from manyformer.position.max_length import MaxLengthPosition
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import init_std, scale_residual_init, stack

PAPER = "Liu et al. 2021, Pay Attention to MLPs, arXiv:2105.08050"
NEW = "One half of a feed-forward layer, mixed along the sequence by fixed weights, gates the other: no attention."

PositionWeightKind = Literal["table", "shifts"]


@recipe(
    "gMLP",
    paper=PAPER,
    summary=NEW,
    task="language-model",
    causal=True,
    incremental_decoding=True,
    cost="O(l^2 d + l d^2) per layer",
    reasons={"cross_attention": "a language model reads one sequence only"},
    tiny_keywords={"attention_dim": 6},
)
def gmlp(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 16,
    ff_dim: int | None = None,
    max_length: int = 1024,
    weights: PositionWeightKind = "table",
    attention_dim: int | None = None,
    dropout: float = 0.0,
) -> LanguageModel:
    """Causal: the matrix over positions is lower triangular. `ff_dim` is 6 dim unless given; pre-norm, no positions.

    Section 2; the paper's models are encoders. `weights` are a number for each pair of positions or, as for masked
    words in section 4, for each distance. `attention_dim` is the width of the tiny attention of aMLP (section 4.3).
    """
    embed = TokenEmbedding(vocab, dim, position=MaxLengthPosition(max_length), std=init_std(dim), dropout=dropout)
    body = _body(dim, depth, ff_dim, _weights(weights, max_length, depth), Causal(), attention_dim, dropout)
    return LanguageModel(embed, body, ClassHead(dim, vocab, tied=embed.token))


@recipe(
    "gMLP encoder",
    paper=PAPER,
    summary=NEW,
    task="masked",
    cost="O(l^2 d + l d^2) per layer",
    reasons={
        "causal": "every token sees both sides",
        "incremental_decoding": "a later token changes all earlier outputs, so nothing can be kept",
        "cross_attention": "it reads one sequence only",
    },
    tiny_keywords={"attention_dim": 6},
)
def gmlp_encoder(
    vocab: int = 30522,
    dim: int = 512,
    depth: int = 48,
    ff_dim: int | None = None,
    max_length: int = 512,
    weights: PositionWeightKind = "shifts",
    attention_dim: int | None = None,
    dropout: float = 0.0,
) -> MaskedLM:
    """The paper's base model for masked words by default, section 4; otherwise as `gmlp`."""
    embed = TokenEmbedding(vocab, dim, position=MaxLengthPosition(max_length), std=init_std(dim), dropout=dropout)
    body = _body(dim, depth, ff_dim, _weights(weights, max_length, depth), AllKeys(), attention_dim, dropout)
    transform = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.LayerNorm(dim))
    return MaskedLM(embed, body, ClassHead(dim, vocab, tied=embed.token, transform=transform, bias=True))


def gate(
    dim: int, ff_dim: int | None, weights: PositionPairs, mask: Mask | None = None, attention: int | None = None
) -> SpatialGate:
    """One layer's spatial gating unit with its two projections, and the tiny attention where it has a width."""
    ff_dim = 6 * dim if ff_dim is None else ff_dim
    tiny = None
    if attention is not None:
        tiny = Attention(dim, 1, SoftmaxKernel(mask), head_dim=attention, value_dim=attention, out_dim=ff_dim // 2)
    return SpatialGate(dim, ff_dim, weights, mask=mask, attention=tiny)


def near_zero(max_length: int) -> float:
    """How weights over positions start: so small that their sum over all of them hardly counts beside the bias of 1."""
    return 1e-3 / max_length


def _weights(kind: PositionWeightKind, max_length: int, depth: int) -> list[PositionPairs]:
    make = PairTable if kind == "table" else ToeplitzPairs
    return [make(max_length, std=near_zero(max_length)) for _ in range(depth)]


def _body(
    dim: int,
    depth: int,
    ff_dim: int | None,
    weights: list[PositionPairs],
    mask: Mask,
    attention: int | None,
    dropout: float,
) -> Chain:
    each = iter(weights)

    def layer() -> dict[str, Layer]:
        return {"mixer": gate(dim, ff_dim, next(each), mask, attention)}

    body = stack(depth, layer, order="pre", norm=partial(nn.LayerNorm, dim), dropout=dropout)
    scale_residual_init(body, depth, std=init_std(dim))
    return body
