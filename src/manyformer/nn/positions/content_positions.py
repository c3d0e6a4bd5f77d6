"""Encodings that act on queries, keys and scores by what tokens contain: norms, caps, counted keys, scores of pairs."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.nn.core import TokenPositions
from manyformer.nn.positions.position import Keys, PairScores, Position, Queries, signed_distances
from manyformer.nn.runtime.device_reads import ConstantTensor
from manyformer.nn.runtime.head_selection import HeadSelection, PerHeadTensors
from manyformer.nn.runtime.length_norms import RMSNorm
from manyformer.nn.runtime.torch_internals import weight_dtype


@final
class HeadNorm(Position):
    """Divides queries and keys by their root mean square in each head, with a gain for each channel ("QK-norm").

    Henry et al. 2020 (arXiv:2010.04245) normalize them so that scores cannot saturate; this is the form of Qwen3 (2025,
    arXiv:2505.09388, section 2), before rotary positions, with one gain for all heads. `width` is that of a head.
    Without `learned` there is no gain, and the order does not matter; both are then multiplied by `scale`.
    """

    def __init__(self, width: int, *, eps: float = 1e-6, learned: bool = True, scale: float = 1.0) -> None:
        super().__init__()
        self.query_norm = RMSNorm(width, eps, elementwise_affine=learned)
        self.key_norm = RMSNorm(width, eps, elementwise_affine=learned)
        self.scale = scale

    def query(self, q: Float[Tensor, "b h l e"], positions: TokenPositions) -> Float[Tensor, "b h l e"]:
        return self._scaled(_normalized(q, self.query_norm))

    def key(self, k: Float[Tensor, "b g l e"], positions: TokenPositions) -> Float[Tensor, "b g l e"]:
        return self._scaled(_normalized(k, self.key_norm))

    def _scaled(self, x: Tensor) -> Tensor:
        if self.scale == 1.0:
            return x
        return x * self.scale


@final
class AllHeadsNorm(Position):
    """Divides queries and keys by their root mean square over all heads together, with a gain for each channel.

    OLMo 2 (2024, arXiv:2501.00656, section 3.2), before rotary positions. `query_heads` and `key_heads` have `width`
    channels each."""

    couples_heads = True

    def __init__(self, query_heads: int, key_heads: int, width: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.query_norm = RMSNorm(query_heads * width, eps)
        self.key_norm = RMSNorm(key_heads * width, eps)

    def query(self, q: Float[Tensor, "b h l e"], positions: TokenPositions) -> Float[Tensor, "b h l e"]:
        return _normalized_together(q, self.query_norm)

    def key(self, k: Float[Tensor, "b g l e"], positions: TokenPositions) -> Float[Tensor, "b g l e"]:
        return _normalized_together(k, self.key_norm)


def _normalized_together(x: Tensor, norm: RMSNorm) -> Tensor:
    by_token = x.transpose(1, 2)
    return _normalized(by_token.flatten(2), norm).view(by_token.shape).transpose(1, 2)


def _normalized(x: Tensor, norm: RMSNorm) -> Tensor:
    # under autocast the projections are narrower than the gain
    wide = x.to(weight_dtype(norm)) if norm.elementwise_affine else x
    normalized: Tensor = norm(wide)
    return normalized.to(x.dtype)


@final
class ScoreCap(Position):
    """Scores s become cap tanh(s / cap), which are between -cap and cap (Gemma 2, 2024, arXiv:2408.00118, section 2).

    Scores are computed explicitly for it, since torch's fused attention cannot change them. Raises ValueError unless
    `cap` is above 0."""

    def __init__(self, cap: float) -> None:
        super().__init__()
        if cap <= 0:
            raise ValueError(f"ScoreCap: cap ({cap}) must be above 0")
        self.cap = cap

    def score(
        self, logits: PairScores, q: Queries, k: Keys, query_positions: TokenPositions, key_positions: TokenPositions
    ) -> PairScores:
        return capped(logits, self.cap)

    def extra_repr(self) -> str:
        return f"{self.cap:g}"


def capped(x: Tensor, cap: float) -> Tensor:
    """cap tanh(x / cap): about x where that is small, and between -cap and cap everywhere."""
    return (x / cap).tanh() * cap


@final
class ContextualPosition(Position):
    """CoPE: a query counts the tokens since a key through gates (Golovneva et al. 2024, arXiv:2405.18719, section 4).

    The position of key j for query i is the sum of sigmoid(q_i k_m / sqrt(e)) over the tokens m from j to i, both
    included, at most `count` - 1. A score gets the unscaled product of the query with the vector of that position,
    interpolated linearly between whole positions. As in the paper one table, zero at first, serves all heads of a
    layer. A gate needs every token from the key to the query, hence the mask `Causal()`.
    """

    needs_every_key = True

    def __init__(self, width: int, count: int = 64) -> None:
        super().__init__()
        if count < 2:
            raise ValueError(f"ContextualPosition: count ({count}) must be at least 2 positions")
        self.vectors = nn.Parameter(torch.zeros(count, width))

    def score(
        self, logits: PairScores, q: Queries, k: Keys, query_positions: TokenPositions, key_positions: TokenPositions
    ) -> PairScores:
        earlier = signed_distances(query_positions, key_positions) <= 0
        visible = (earlier & query_positions.same_document(key_positions))[:, None]
        gates = logits.to(torch.promote_types(logits.dtype, torch.float32)).sigmoid().masked_fill(~visible, 0.0)
        # summed from the query back, so that the sums of near keys are exact whatever came before them
        position = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=len(self.vectors) - 1)
        lower = position.detach().floor()
        share = (position - lower).to(logits.dtype)
        index = lower.long()
        terms = q @ self.vectors.T.to(q.dtype)
        next_terms = terms.gather(-1, (index + 1).clamp(max=len(self.vectors) - 1))
        return logits + torch.lerp(terms.gather(-1, index), next_terms, share)

    def extra_repr(self) -> str:
        return f"count={len(self.vectors)}"


@final
class GraphPairPosition(Position, PerHeadTensors):
    """Adds `TokenPositions.pair_scores` to the scaled scores; ValueError if the model computed none."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        # the heads that remain where some are removed
        self.head_numbers = ConstantTensor(tuple(range(heads)), torch.long)

    @property
    def differs_by_head(self) -> bool:
        return len(self.head_numbers.values) > 1

    def keep_heads(self, selection: HeadSelection) -> None:
        numbers = self.head_numbers.values
        remaining = tuple(numbers[head] for head in selection.entries(len(numbers)))
        self.head_numbers = ConstantTensor(remaining, torch.long)

    def score(
        self, logits: PairScores, q: Queries, k: Keys, query_positions: TokenPositions, key_positions: TokenPositions
    ) -> PairScores:
        if query_positions.pair_scores is None:
            raise ValueError("this layer needs the scores of pairs of nodes, which GraphormerEncoding computes")
        head_numbers = self.head_numbers.on(logits.device)
        return logits + query_positions.pair_scores.index_select(2, head_numbers).transpose(1, 2)
