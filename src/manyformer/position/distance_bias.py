"""Biases on scores by distance alone: fixed slopes, and a learned number for each range of distances."""

import bisect
from typing import Literal, final, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.core import TokenPositions
from manyformer.position.distance_terms import DistanceTerms, distance
from manyformer.position.position import Position

BiasDirection = Literal["past", "both"]
"""Where the keys of a query are: before it (and at it), or on both sides."""


@final
class AlibiPosition(Position):
    """A penalty on distance, -slope |i - j|, a slope for each head (Press et al. 2022, arXiv:2108.12409, section 3).

    The slopes are 2^(-8/n), 2^(-16/n), ... for n heads, a power of two; otherwise those of the next lower power p,
    followed by the first, third, ... of 2 p, in this order (the authors' `get_slopes`). They are fixed: learned ones
    did not extrapolate. The penalty is added to the scaled scores, itself unscaled. The paper is causal; under a mask
    that is not, a key ahead costs as much as one behind.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        if heads < 1:
            raise ValueError(f"AlibiPosition: heads ({heads}) must be at least 1")
        power = 1 << (heads.bit_length() - 1)
        steps = [2 * n for n in range(1, power + 1)] + [2 * n + 1 for n in range(heads - power)]
        # whole numbers, so that no change of the model's type makes slopes less exact
        self.register_buffer("steps", torch.tensor(steps), persistent=False)
        self.steps: Tensor
        self.rate = -4 / power

    @property
    def slopes(self) -> Float[Tensor, " h"]:
        """The slope of each head, in float32."""
        return torch.exp2(self.steps * self.rate)

    def score(
        self,
        logits: Float[Tensor, "b h l s"],
        q: Float[Tensor, "b h l e"],
        k: Float[Tensor, "b h s e"],
        query_positions: TokenPositions,
        key_positions: TokenPositions,
    ) -> Float[Tensor, "b h l s"]:
        return logits - self.slopes[:, None, None] * distance(query_positions, key_positions)[:, None].abs()

    def distance_terms(self, back: int, ahead: int) -> DistanceTerms:
        far = torch.arange(-back, ahead + 1, device=self.steps.device).abs()
        return DistanceTerms(back, ahead, bias=-self.slopes[:, None] * far)

    def extra_repr(self) -> str:
        return f"{len(self.steps)} heads"


@final
class T5BiasPosition(Position):
    """A learned bias per head for each range of distances (Raffel et al. 2020, arXiv:1910.10683, section 2.1).

    Half of the buckets hold one distance each, the others grow geometrically up to `max_distance`, beyond which all is
    one. With `sides="both"` keys ahead have buckets of their own, half of them all. The paper has one table for all
    layers: pass the same object to each. The bias is added to the scores as they are; T5 itself does not scale those,
    which is `SoftmaxKernel(scale=1.0)`. Raises ValueError where the buckets cannot be filled."""

    def __init__(
        self, heads: int, *, buckets: int = 32, max_distance: int = 128, sides: BiasDirection = "both"
    ) -> None:
        super().__init__()
        check_sides(sides)
        if buckets < 4 or buckets % 4:
            raise ValueError(f"T5BiasPosition: buckets ({buckets}) must be a multiple of 4")
        each = buckets if sides == "past" else buckets // 2
        if max_distance <= each // 2:
            raise ValueError(
                f"T5BiasPosition: far ({max_distance}) must be above {each // 2}, the distances that have their own bucket"
            )
        self.sides: BiasDirection = sides
        self.max_distance = max_distance
        edges = bucket_edges(each, max_distance)
        self.register_buffer("edges", torch.tensor(edges), persistent=False)
        self.edges: Tensor
        self.last = self.max_distance = edges[-1]
        self.weight = nn.Parameter(torch.randn(buckets, heads) * 0.02)

    def bucket(self, ahead: Int[Tensor, "*p"]) -> Int[Tensor, "*p"]:
        """The bucket of a key that is so far ahead of its query."""
        if self.sides == "past":
            return torch.bucketize(-ahead, self.edges, right=True)
        return torch.bucketize(ahead.abs(), self.edges, right=True) + (ahead > 0) * (self.weight.shape[0] // 2)

    def score(
        self,
        logits: Float[Tensor, "b h l s"],
        q: Float[Tensor, "b h l e"],
        k: Float[Tensor, "b h s e"],
        query_positions: TokenPositions,
        key_positions: TokenPositions,
    ) -> Float[Tensor, "b h l s"]:
        return logits + self.weight[self.bucket(distance(query_positions, key_positions))].movedim(-1, 1)

    def distance_terms(self, back: int, ahead: int) -> DistanceTerms:
        back = min(back, self.last)
        ahead = min(ahead, 0 if self.sides == "past" else self.last)
        far = torch.arange(-back, ahead + 1, device=self.edges.device)
        return DistanceTerms(back, ahead, bias=self.weight[self.bucket(far)].T)

    def extra_repr(self) -> str:
        buckets, heads = self.weight.shape
        return f"{heads} heads, {buckets} buckets, far={self.max_distance}, sides={self.sides}"


def check_sides(sides: str) -> None:
    """Raise ValueError for a word that is none of `BiasDirection`."""
    if sides not in get_args(BiasDirection):
        raise ValueError(f"sides '{sides}' must be one of {', '.join(get_args(BiasDirection))}")


def bucket_edges(buckets: int, far: int) -> list[int]:
    """The first distance of each bucket but the first, in whole numbers: logarithms can err by one bucket.

    With e = buckets / 2, bucket e + t begins at the first n with e log(n / e) / log(far / e) >= t.
    """
    exact = buckets // 2
    wide = buckets - exact
    rest = [
        bisect.bisect_left(range(far + 1), far**step * exact**wide, key=lambda n: n**wide * exact**step)
        for step in range(1, wide)
    ]
    return [*range(1, exact + 1), *rest]
