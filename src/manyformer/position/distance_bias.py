"""Score biases that depend on the distance alone: fixed slopes, and a learned bias per bucket of distances."""

import bisect
from typing import Literal, final, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.core import TokenPositions
from manyformer.head_selection import PerHeadTensors
from manyformer.position.distance_terms import DistanceTerms, signed_distances
from manyformer.position.position import Keys, PairScores, Position, Queries
from manyformer.position.sinusoid_table import table_dtype

BiasDirection = Literal["past", "both"]
"""Whether keys lie at or before their query only, or on both sides of it."""


@final
class AlibiPosition(Position, PerHeadTensors):
    """A linear distance penalty -slope |i - j|, with a slope per head (Press et al. 2022, arXiv:2108.12409, section 3).

    The slopes are 2^(-8/n), 2^(-16/n), ... for n heads, a power of two; otherwise those of the next lower power p,
    followed by the first, third, ... of 2 p, in this order (the authors' `get_slopes`). They are fixed: learned ones
    did not extrapolate. The penalty is added to the scaled scores, itself unscaled. The paper is causal; under a
    bidirectional mask, a later key has the same penalty as an earlier one at the same distance.
    """

    head_axes = (("exponents", -1),)

    def __init__(self, heads: int) -> None:
        super().__init__()
        if heads < 1:
            raise ValueError(f"AlibiPosition: heads ({heads}) must be at least 1")
        power_of_two = 1 << (heads.bit_length() - 1)
        exponents = [2 * n for n in range(1, power_of_two + 1)] + [2 * n + 1 for n in range(heads - power_of_two)]
        # integers, so that no change of the model's dtype makes slopes less exact
        self.register_buffer("exponents", torch.tensor(exponents), persistent=False)
        self.exponents: Tensor
        # gives the precision of the model, which has no parameter here
        self.register_buffer("model_marker", torch.zeros(()), persistent=False)
        self.model_marker: Tensor
        self.exponent_scale = -4 / power_of_two

    @property
    def slopes(self) -> Float[Tensor, " h"]:
        """The slope of each head, in float32, or in float64 for a model of that precision."""
        return torch.exp2(self.exponents.to(table_dtype(self.model_marker.dtype)) * self.exponent_scale)

    def score(
        self, logits: PairScores, q: Queries, k: Keys, query_positions: TokenPositions, key_positions: TokenPositions
    ) -> PairScores:
        return logits - self.slopes[:, None, None] * signed_distances(query_positions, key_positions)[:, None].abs()

    def distance_terms(self, lookback: int, lookahead: int) -> DistanceTerms:
        distances = torch.arange(-lookback, lookahead + 1, device=self.exponents.device).abs()
        return DistanceTerms(lookback, lookahead, bias=-self.slopes[:, None] * distances)

    def extra_repr(self) -> str:
        return f"{len(self.exponents)} heads"


@final
class T5BiasPosition(Position, PerHeadTensors):
    """A learned bias per head for each range of distances (Raffel et al. 2020, arXiv:1910.10683, section 2.1).

    Half of the buckets hold one distance each, the others grow geometrically up to `max_distance`; all larger distances
    share the last bucket. With `direction="both"` half of the buckets are for later keys. The paper has one table for
    all layers: pass the same object to each. The bias is added to the scores as they are; T5 itself does not scale
    scores, which is `SoftmaxKernel(scale=1.0)`. Raises ValueError if the buckets cannot be filled."""

    head_axes = (("weight", -1),)

    def __init__(
        self, heads: int, *, buckets: int = 32, max_distance: int = 128, direction: BiasDirection = "both"
    ) -> None:
        super().__init__()
        check_direction(direction)
        if buckets < 4 or buckets % 4:
            raise ValueError(f"T5BiasPosition: buckets ({buckets}) must be a multiple of 4")
        buckets_per_direction = buckets if direction == "past" else buckets // 2
        if max_distance <= buckets_per_direction // 2:
            raise ValueError(
                f"T5BiasPosition: max_distance ({max_distance}) must be above {buckets_per_direction // 2}, "
                "the number of distances with a separate bucket"
            )
        self.direction: BiasDirection = direction
        edges = bucket_edges(buckets_per_direction, max_distance)
        self.register_buffer("edges", torch.tensor(edges), persistent=False)
        self.edges: Tensor
        self.max_distance: int = edges[-1]
        self.weight = nn.Parameter(torch.randn(buckets, heads) * 0.02)

    def bucket_index(self, distances: Int[Tensor, "*p"]) -> Int[Tensor, "*p"]:
        """The bucket of each signed distance (key position minus query position)."""
        if self.direction == "past":
            return torch.bucketize(-distances, self.edges, right=True)
        return torch.bucketize(distances.abs(), self.edges, right=True) + (distances > 0) * (self.weight.shape[0] // 2)

    def score(
        self, logits: PairScores, q: Queries, k: Keys, query_positions: TokenPositions, key_positions: TokenPositions
    ) -> PairScores:
        return logits + self.weight[self.bucket_index(signed_distances(query_positions, key_positions))].movedim(-1, 1)

    def distance_terms(self, lookback: int, lookahead: int) -> DistanceTerms:
        lookback = min(lookback, self.max_distance)
        lookahead = min(lookahead, 0 if self.direction == "past" else self.max_distance)
        distances = torch.arange(-lookback, lookahead + 1, device=self.edges.device)
        return DistanceTerms(lookback, lookahead, bias=self.weight[self.bucket_index(distances)].T)

    def extra_repr(self) -> str:
        buckets, heads = self.weight.shape
        return f"{heads} heads, {buckets} buckets, max_distance={self.max_distance}, direction={self.direction}"


def check_direction(direction: str) -> None:
    """Raise ValueError unless `direction` is a `BiasDirection`."""
    if direction not in get_args(BiasDirection):
        raise ValueError(f"direction '{direction}' must be one of {', '.join(get_args(BiasDirection))}")


def bucket_edges(buckets: int, max_distance: int) -> list[int]:
    """The smallest distance of each bucket but the first, in integer arithmetic: logarithms can err by one bucket.

    With e = buckets / 2, bucket e + t begins at the first n with e log(n / e) / log(max_distance / e) >= t.
    """
    exact = buckets // 2
    growing = buckets - exact
    edges = list(range(1, exact + 1))
    for step in range(1, growing):
        target = max_distance**step * exact**growing
        edges.append(bisect.bisect_left(range(max_distance + 1), target, key=lambda n: n**growing * exact**step))
    return edges
