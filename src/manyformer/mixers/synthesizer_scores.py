"""Where the scores of keys can come from: the query alone, the positions alone, or query and key as usual."""

import math
from abc import ABC, abstractmethod
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.attention import split_heads
from manyformer.core import ContiguousLayout, TokenPositions
from manyformer.mixers.position_pairs import PositionPairs, position_index


class SynthesizerScores(nn.Module, ABC):
    """Scores of all keys for each query, before the mask and the softmax; `width` numbers a key and head are kept."""

    width: int = 0

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def key(self, x: Float[Tensor, "b s d"]) -> Float[Tensor, "b h s e"]:
        """What is kept of each token as a key; nothing unless scores depend on it."""
        return x.new_empty(x.shape[0], self.heads, x.shape[1], 0)

    @abstractmethod
    def forward(
        self,
        x: Float[Tensor, "b l d"],
        k: Float[Tensor, "b h s e"],
        query_positions: TokenPositions,
        key_positions: TokenPositions,
    ) -> Float[Tensor, "#b h l s"]: ...


@final
class FixedScores(SynthesizerScores):
    """A number for each pair of positions: what stands there plays no part (Tay et al. 2021, section 3.2)."""

    def __init__(self, pairs: PositionPairs) -> None:
        super().__init__(pairs.heads)
        self.pairs = pairs

    def forward(
        self,
        x: Float[Tensor, "b l d"],
        k: Float[Tensor, "b h s e"],
        query_positions: TokenPositions,
        key_positions: TokenPositions,
    ) -> Float[Tensor, "#b h l s"]:
        return self.pairs(query_positions, key_positions)


@final
class DenseScores(SynthesizerScores):
    """A score for each position from the query alone: W2 relu(W1 x + b1) + b2 (Tay et al. 2021, section 3.1)."""

    def __init__(self, dim: int, heads: int, max_length: int) -> None:
        super().__init__(heads)
        self.max_length = max_length
        self.up = _linear(dim, dim)
        self.weight = nn.Parameter(torch.empty(heads, dim // heads, max_length))
        self.bias = nn.Parameter(torch.zeros(heads, 1, max_length))
        for weight in self.weight:
            nn.init.xavier_uniform_(weight.data)

    def forward(
        self,
        x: Float[Tensor, "b l d"],
        k: Float[Tensor, "b h s e"],
        query_positions: TokenPositions,
        key_positions: TokenPositions,
    ) -> Float[Tensor, "b h l s"]:
        hidden = split_heads(self.up(x).relu(), self.heads)
        if isinstance(key_positions.layout, ContiguousLayout):
            seen = position_index(key_positions, self.max_length)
            return hidden @ self.weight[..., seen] + self.bias[..., seen]
        return at_keys(hidden @ self.weight + self.bias, key_positions)


@final
class FactorizedDenseScores(SynthesizerScores):
    """As `DenseScores`, but the product of two shorter vectors: one for the rest of a position, one for the quotient.

    Tay et al. (2021), section 3.3: A has `rest` numbers and B has longest / rest, and position j has the score
    A[j mod rest] B[j div rest].
    """

    def __init__(self, dim: int, heads: int, max_length: int, *, rest: int | None = None) -> None:
        super().__init__(heads)
        self.max_length = max_length
        self.rest = math.isqrt(max_length - 1) + 1 if rest is None else rest
        self.quotient = -(-max_length // self.rest)
        self.up = _linear(dim, dim)
        width = dim // heads
        self.weight = nn.Parameter(torch.empty(heads, width, self.rest + self.quotient))
        self.bias = nn.Parameter(torch.zeros(heads, 1, self.rest + self.quotient))
        for weight in self.weight:
            nn.init.xavier_uniform_(weight.data)

    def forward(
        self,
        x: Float[Tensor, "b l d"],
        k: Float[Tensor, "b h s e"],
        query_positions: TokenPositions,
        key_positions: TokenPositions,
    ) -> Float[Tensor, "b h l s"]:
        both = split_heads(self.up(x).relu(), self.heads) @ self.weight + self.bias
        a, b = torch.split(both, [self.rest, self.quotient], dim=-1)
        scores = (b[..., :, None] * a[..., None, :]).flatten(-2)
        seen = position_index(key_positions, self.max_length)
        return scores[..., seen] if isinstance(seen, slice) else at_keys(scores, key_positions)


@final
class DotProductScores(SynthesizerScores):
    """The scaled product of query and key, as in attention: a part of mixtures."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(heads)
        self.width = dim // heads
        self.q_proj, self.k_proj = _linear(dim, dim), _linear(dim, dim)

    def key(self, x: Float[Tensor, "b s d"]) -> Float[Tensor, "b h s e"]:
        return split_heads(self.k_proj(x), self.heads)

    def forward(
        self,
        x: Float[Tensor, "b l d"],
        k: Float[Tensor, "b h s e"],
        query_positions: TokenPositions,
        key_positions: TokenPositions,
    ) -> Float[Tensor, "b h l s"]:
        return split_heads(self.q_proj(x), self.heads) @ k.mT / math.sqrt(self.width)


def at_keys(scores: Float[Tensor, "b h l p"], key_positions: TokenPositions) -> Float[Tensor, "b h l s"]:
    """Of scores for all positions those of the keys' positions."""
    index = key_positions.position_ids[:, None, None].expand(-1, scores.shape[1], scores.shape[2], -1)
    return scores.gather(-1, index)


def _linear(dim: int, to: int) -> nn.Linear:
    layer = nn.Linear(dim, to)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
