"""Scores of Synthesizer attention: from the query alone, from positions alone, or from query-key products."""

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
    """Scores of all keys for each query, before the mask and the softmax."""

    key_width: int = 0
    """The width of the cached keys, per head."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def project_key(self, x: Float[Tensor, "b s d"]) -> Float[Tensor, "b h s e"]:
        """The keys to cache; of width 0 unless scores depend on the key's token."""
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
    """Scores by pair of positions, independent of the tokens (Tay et al. 2021, section 3.2)."""

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
    """Scores of all key positions from the query alone: W2 relu(W1 x + b1) + b2 (Tay et al. 2021, section 3.1)."""

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
            index = position_index(key_positions, self.max_length)
            return hidden @ self.weight[..., index] + self.bias[..., index]
        return gather_key_scores(hidden @ self.weight + self.bias, key_positions)


@final
class FactorizedDenseScores(SynthesizerScores):
    """Like `DenseScores`, but products of two shorter vectors, indexed by the remainder and the quotient of a position.

    Tay et al. (2021), section 3.3: A has size `remainders`, B has size max_length / remainders, and position j has the
    score A[j mod remainders] B[j div remainders].
    """

    def __init__(self, dim: int, heads: int, max_length: int, *, remainders: int | None = None) -> None:
        super().__init__(heads)
        self.max_length = max_length
        self.remainders = math.isqrt(max_length - 1) + 1 if remainders is None else remainders
        self.quotients = -(-max_length // self.remainders)
        self.up = _linear(dim, dim)
        head_dim = dim // heads
        self.weight = nn.Parameter(torch.empty(heads, head_dim, self.remainders + self.quotients))
        self.bias = nn.Parameter(torch.zeros(heads, 1, self.remainders + self.quotients))
        for weight in self.weight:
            nn.init.xavier_uniform_(weight.data)

    def forward(
        self,
        x: Float[Tensor, "b l d"],
        k: Float[Tensor, "b h s e"],
        query_positions: TokenPositions,
        key_positions: TokenPositions,
    ) -> Float[Tensor, "b h l s"]:
        factors = split_heads(self.up(x).relu(), self.heads) @ self.weight + self.bias
        a, b = torch.split(factors, [self.remainders, self.quotients], dim=-1)
        scores = (b[..., :, None] * a[..., None, :]).flatten(-2)
        index = position_index(key_positions, self.max_length)
        return scores[..., index] if isinstance(index, slice) else gather_key_scores(scores, key_positions)


@final
class DotProductScores(SynthesizerScores):
    """The scaled products of queries and keys, as in attention, for use in mixtures."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(heads)
        self.key_width = dim // heads
        self.q_proj, self.k_proj = _linear(dim, dim), _linear(dim, dim)

    def project_key(self, x: Float[Tensor, "b s d"]) -> Float[Tensor, "b h s e"]:
        return split_heads(self.k_proj(x), self.heads)

    def forward(
        self,
        x: Float[Tensor, "b l d"],
        k: Float[Tensor, "b h s e"],
        query_positions: TokenPositions,
        key_positions: TokenPositions,
    ) -> Float[Tensor, "b h l s"]:
        return split_heads(self.q_proj(x), self.heads) @ k.mT / math.sqrt(self.key_width)


def gather_key_scores(scores: Float[Tensor, "b h l p"], key_positions: TokenPositions) -> Float[Tensor, "b h l s"]:
    """Gather the scores at the keys' positions from scores of all positions."""
    index = key_positions.position_ids[:, None, None].expand(-1, scores.shape[1], scores.shape[2], -1)
    return scores.gather(-1, index)


def _linear(dim: int, out_dim: int) -> nn.Linear:
    layer = nn.Linear(dim, out_dim)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
