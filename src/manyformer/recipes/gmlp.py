"""gMLP: feed-forward layers whose gates look along the sequence, as a language model and as an encoder."""

from functools import partial
from typing import Literal

from torch import nn

from manyformer.attention import Attention
from manyformer.core import Chain, Layer
from manyformer.kernels import Softmax
from manyformer.masks import Causal, Everything, Mask
from manyformer.mixers import Pairs, Shifts, SpatialGate, Table
from manyformer.models import Embedding, Head, LanguageModel, MaskedLM
from manyformer.position.limit import Limited
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import shrink_outputs, small_std, stack

PAPER = "Liu et al. 2021, Pay Attention to MLPs, arXiv:2105.08050"
NEW = "One half of a feed-forward layer, mixed along the sequence by fixed weights, gates the other: no attention."

Weights = Literal["table", "shifts"]


@recipe(
    "gMLP",
    paper=PAPER,
    new=NEW,
    task="language-model",
    causal=True,
    streams=True,
    cost="O(l^2 d + l d^2) per layer",
    because={"cross": "a language model reads one sequence only"},
    small={"attention": 6},
)
def gmlp(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 16,
    hidden: int | None = None,
    longest: int = 1024,
    weights: Weights = "table",
    attention: int | None = None,
    dropout: float = 0.0,
) -> LanguageModel:
    """Causal: the matrix over positions is lower triangular. `hidden` is 6 dim unless given; pre-norm, no positions.

    Section 2; the paper's models are encoders. `weights` are a number for each pair of positions or, as for masked
    words in section 4, for each distance. `attention` is the width of the tiny attention of aMLP (section 4.3).
    """
    embed = Embedding(vocab, dim, position=Limited(longest), std=small_std(dim), dropout=dropout)
    body = _body(dim, depth, hidden, _weights(weights, longest, depth), Causal(), attention, dropout)
    return LanguageModel(embed, body, Head(dim, vocab, tied=embed.token))


@recipe(
    "gMLP encoder",
    paper=PAPER,
    new=NEW,
    task="masked",
    cost="O(l^2 d + l d^2) per layer",
    because={
        "causal": "every token sees both sides",
        "streams": "a later token changes all earlier outputs, so nothing can be kept",
        "cross": "it reads one sequence only",
    },
    small={"attention": 6},
)
def gmlp_encoder(
    vocab: int = 30522,
    dim: int = 512,
    depth: int = 48,
    hidden: int | None = None,
    longest: int = 512,
    weights: Weights = "shifts",
    attention: int | None = None,
    dropout: float = 0.0,
) -> MaskedLM:
    """The paper's base model for masked words by default, section 4; otherwise as `gmlp`."""
    embed = Embedding(vocab, dim, position=Limited(longest), std=small_std(dim), dropout=dropout)
    body = _body(dim, depth, hidden, _weights(weights, longest, depth), Everything(), attention, dropout)
    transform = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.LayerNorm(dim))
    return MaskedLM(embed, body, Head(dim, vocab, tied=embed.token, transform=transform, bias=True))


def gate(
    dim: int, hidden: int | None, weights: Pairs, mask: Mask | None = None, attention: int | None = None
) -> SpatialGate:
    """One layer's spatial gating unit with its two projections, and the tiny attention where it has a width."""
    hidden = 6 * dim if hidden is None else hidden
    tiny = None
    if attention is not None:
        tiny = Attention(dim, 1, Softmax(mask), key=attention, value=attention, to=hidden // 2)
    return SpatialGate(dim, hidden, weights, mask=mask, attention=tiny)


def near_zero(longest: int) -> float:
    """How weights over positions start: so small that their sum over all of them hardly counts beside the bias of 1."""
    return 1e-3 / longest


def _weights(kind: Weights, longest: int, depth: int) -> list[Pairs]:
    make = Table if kind == "table" else Shifts
    return [make(longest, std=near_zero(longest)) for _ in range(depth)]


def _body(
    dim: int, depth: int, hidden: int | None, weights: list[Pairs], mask: Mask, attention: int | None, dropout: float
) -> Chain:
    each = iter(weights)

    def layer() -> dict[str, Layer]:
        return {"mixer": gate(dim, hidden, next(each), mask, attention)}

    body = stack(depth, layer, order="pre", norm=partial(nn.LayerNorm, dim), dropout=dropout)
    shrink_outputs(body, depth, std=small_std(dim))
    return body
