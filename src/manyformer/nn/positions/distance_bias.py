"""Scores that depend on the distance of two tokens alone: fixed slopes, learned buckets, functions and factors."""

import bisect
import math
from typing import Literal, final, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.nn.core import ContiguousLayout, TokenPositions
from manyformer.nn.positions.absolute import table_dtype
from manyformer.nn.positions.position import (
    DistanceTerms,
    Keys,
    PairScores,
    Position,
    Queries,
    evaluate_distances,
    signed_distances,
)
from manyformer.nn.runtime.device_reads import ConstantTensor
from manyformer.nn.runtime.head_selection import HeadSelection, PerHeadTensors
from manyformer.nn.runtime.torch_internals import weight_dtype

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

    def __init__(self, heads: int) -> None:
        super().__init__()
        if heads < 1:
            raise ValueError(f"AlibiPosition: heads ({heads}) must be at least 1")
        power_of_two = 1 << (heads.bit_length() - 1)
        exponents = [2 * n for n in range(1, power_of_two + 1)] + [2 * n + 1 for n in range(heads - power_of_two)]
        # integers, so that no change of the model's dtype makes slopes less exact
        self.exponents = ConstantTensor(tuple(exponents), torch.long)
        # gives the device and the precision of the model, which has no parameter here; its value means nothing
        self.register_buffer("model_marker", torch.zeros(()), persistent=False)
        self.model_marker: Tensor
        self.exponent_scale = -4 / power_of_two

    @property
    def slopes(self) -> Float[Tensor, " h"]:
        """The slope of each head, in float32, or in float64 for a model of that precision."""
        exponents = self.exponents.on(self.model_marker.device)
        return torch.exp2(exponents.to(table_dtype(self.model_marker.dtype)) * self.exponent_scale)

    @property
    def differs_by_head(self) -> bool:
        return len(self.exponents.values) > 1

    def keep_heads(self, selection: HeadSelection) -> None:
        exponents = self.exponents.values
        remaining = tuple(exponents[head] for head in selection.entries(len(exponents)))
        self.exponents = ConstantTensor(remaining, torch.long)

    def score(
        self, logits: PairScores, q: Queries, k: Keys, query_positions: TokenPositions, key_positions: TokenPositions
    ) -> PairScores:
        return logits - self.slopes[:, None, None] * signed_distances(query_positions, key_positions)[:, None].abs()

    def distance_terms(self, lookback: int, lookahead: int) -> DistanceTerms:
        distances = torch.arange(-lookback, lookahead + 1, device=self.model_marker.device).abs()
        return DistanceTerms(lookback, lookahead, bias=-self.slopes[:, None] * distances)

    def extra_repr(self) -> str:
        return f"{len(self.exponents.values)} heads"


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
        self.edges = ConstantTensor(tuple(edges), torch.long)
        self.max_distance: int = edges[-1]
        self.weight = nn.Parameter(torch.randn(buckets, heads) * 0.02)

    def bucket_index(self, distances: Int[Tensor, "*p"]) -> Int[Tensor, "*p"]:
        """The bucket of each signed distance (key position minus query position)."""
        edges = self.edges.on(distances.device)
        if self.direction == "past":
            return torch.bucketize(-distances, edges, right=True)
        # later keys have the second half of the table
        return torch.bucketize(distances.abs(), edges, right=True) + (distances > 0) * (self.weight.shape[0] // 2)

    def score(
        self, logits: PairScores, q: Queries, k: Keys, query_positions: TokenPositions, key_positions: TokenPositions
    ) -> PairScores:
        return logits + self.weight[self.bucket_index(signed_distances(query_positions, key_positions))].movedim(-1, 1)

    def distance_terms(self, lookback: int, lookahead: int) -> DistanceTerms:
        lookback = min(lookback, self.max_distance)
        lookahead = min(lookahead, 0 if self.direction == "past" else self.max_distance)
        distances = torch.arange(-lookback, lookahead + 1, device=self.weight.device)
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
        # the inequality of the logarithms as one of whole powers
        target = max_distance**step * exact**growing
        edges.append(bisect.bisect_left(range(max_distance + 1), target, key=lambda n: n**growing * exact**step))
    return edges


KerpleVariant = Literal["logarithmic", "power"]
"""The function of the distance: -r1 log(1 + r2 |i - j|), or -r1 |i - j|^r2 with r2 at most 2."""

MIN_START = 1e-2
"""The smallest initial r1 and r2, which is also the least that the authors' code allows."""


@final
class KerplePosition(Position, PerHeadTensors):
    """A learned penalty on the distance for each head (Chi et al. 2022, KERPLE, arXiv:2205.09921, section 4).

    Both variants are conditionally positive definite kernels of |i - j|; ALiBi is the power 1. As in the authors' code
    r1 begins uniform in (0, 2) and r2 in (0, 1), and the penalty is added to the scaled scores. They clamp both at
    0.01; here softplus keeps them above 0, and a scaled sigmoid keeps the power below 2.
    """

    head_axes = (("raw_r1", -1), ("raw_r2", -1))

    def __init__(self, heads: int, variant: KerpleVariant = "logarithmic") -> None:
        super().__init__()
        if heads < 1:
            raise ValueError(f"KerplePosition: heads ({heads}) must be at least 1")
        if variant not in get_args(KerpleVariant):
            raise ValueError(f"KerplePosition: variant '{variant}' must be one of {', '.join(get_args(KerpleVariant))}")
        self.variant: KerpleVariant = variant
        r1, r2 = ((limit * torch.rand(heads)).clamp(min=MIN_START) for limit in (2.0, 1.0))
        # stored before softplus and sigmoid, so that both begin at the drawn numbers
        self.raw_r1 = nn.Parameter(_inverse_softplus(r1))
        self.raw_r2 = nn.Parameter(torch.logit(r2 / 2) if variant == "power" else _inverse_softplus(r2))

    def bias(self, distances: Int[Tensor, "*p"]) -> Float[Tensor, "h *p"]:
        """The bias of each head at these distances, in float32 at least."""
        shape = (-1, *(1 for _ in distances.shape))
        compute_dtype = torch.promote_types(self.raw_r1.dtype, torch.float32)
        r1, r2 = (raw.to(compute_dtype).view(shape) for raw in (self.raw_r1, self.raw_r2))
        magnitude = distances.abs().to(compute_dtype)
        if self.variant == "power":
            return -F.softplus(r1) * magnitude.pow(2 * torch.sigmoid(r2))
        return -F.softplus(r1) * torch.log1p(F.softplus(r2) * magnitude)

    def score(
        self, logits: PairScores, q: Queries, k: Keys, query_positions: TokenPositions, key_positions: TokenPositions
    ) -> PairScores:
        return logits + evaluate_distances(self.bias, query_positions, key_positions).to(logits.dtype)

    def distance_terms(self, lookback: int, lookahead: int) -> DistanceTerms:
        distances = torch.arange(-lookback, lookahead + 1, device=self.raw_r1.device)
        return DistanceTerms(lookback, lookahead, bias=self.bias(distances).to(self.raw_r1.dtype))

    def extra_repr(self) -> str:
        return f"{len(self.raw_r1)} heads, {self.variant}"


@final
class FirePosition(Position, PerHeadTensors):
    """A bias from a small network that reads the distance as a share of the query's position (Li et al. 2024, FIRE).

    arXiv:2310.04418, section 3: network(psi(i - j) / psi(max(i, L))) with psi(x) = log(c x + 1) for the query at
    position i of its document, so that longer texts stay in the range of inputs that was trained; below the length L
    it is a function of the distance alone. c (0.1 at first) and a factor on `length` that gives L are learned. The
    network has one hidden ReLU layer. Unlike the authors' it has no bias per head, which the softmax would ignore.
    """

    head_axes = (("output", -2),)
    epsilon = 1e-6

    def __init__(self, heads: int, *, width: int = 32, length: float = 512.0) -> None:
        super().__init__()
        if heads < 1 or width < 1 or length <= 0:
            raise ValueError(f"FirePosition: heads ({heads}), width ({width}) and length ({length}) must be above 0")
        self.length = length
        self.c = nn.Parameter(torch.tensor(0.1))
        self.length_factor = nn.Parameter(torch.tensor(1.0))
        self.hidden = nn.Linear(1, width)
        self.output = nn.Parameter(torch.empty(heads, width).uniform_(-1, 1) / math.sqrt(width))

    def score(
        self, logits: PairScores, q: Queries, k: Keys, query_positions: TokenPositions, key_positions: TokenPositions
    ) -> PairScores:
        compute_dtype = torch.promote_types(self.c.dtype, torch.float32)
        distances = signed_distances(query_positions, key_positions).abs()
        are_contiguous = all(isinstance(x.layout, ContiguousLayout) for x in (query_positions, key_positions))
        if are_contiguous:
            query_ids = query_positions.position_ids[:1]
        else:
            query_ids = query_positions.position_ids
        # magnitudes: a learned factor or c below zero would be no length
        longest = torch.maximum(query_ids.to(compute_dtype), self.length * self.length_factor.abs().to(compute_dtype))
        share = self._psi(distances.to(compute_dtype)) / (self._psi(longest) + self.epsilon)[..., None]
        hidden = self.hidden(share[..., None].to(weight_dtype(self.hidden))).relu()
        return logits + F.linear(hidden, self.output.to(hidden.dtype)).movedim(-1, 1).to(logits.dtype)

    def _psi(self, x: Float[Tensor, "*p"]) -> Float[Tensor, "*p"]:
        return torch.log1p(self.c.abs().to(x.dtype) * x)

    def extra_repr(self) -> str:
        return f"{len(self.output)} heads, length={self.length:g}"


def _inverse_softplus(x: Float[Tensor, " h"]) -> Float[Tensor, " h"]:
    # log(exp(x) - 1), without an exponential that overflows
    return x + torch.log(-torch.expm1(-x))


@final
class DistanceAwarePosition(Position, PerHeadTensors):
    """Scores relu(q k / sqrt(e)) times a learned function of the distance (Wu et al. 2021, DA-Transformer, section 3).

    With R = w |i - j| it is (1 + exp(v)) / (1 + exp(v - R)): 1 at distance 0, falling to 0 for negative w, rising to
    1 + exp(v) for positive w; each head has its own w and v. The paper gives no initialization: here w alternates
    between -0.1 and 0.1, so that even heads prefer small distances and odd heads large ones, and v is 0. A key of
    score zero is not hidden: its weight is that of exp(0), so masks are applied afterwards. The distance has no
    direction; under a bidirectional mask, a text and its reverse give the same outputs.
    """

    head_axes = (("w", -1), ("v", -1))
    uses_positive_scores = True

    def __init__(self, heads: int) -> None:
        super().__init__()
        if heads < 1:
            raise ValueError(f"DistanceAwarePosition: heads ({heads}) must be at least 1")
        self.w = nn.Parameter(torch.tensor([(-0.1, 0.1)[head % 2] for head in range(heads)]))
        self.v = nn.Parameter(torch.zeros(heads))

    def score(
        self, logits: PairScores, q: Queries, k: Keys, query_positions: TokenPositions, key_positions: TokenPositions
    ) -> PairScores:
        return logits.relu() * evaluate_distances(self.factor, query_positions, key_positions)

    def factor(self, distances: Int[Tensor, "*p"]) -> Float[Tensor, "h *p"]:
        """The factor of scores at these distances, for each head; written so that no exponential overflows."""
        w, v = (x.view(-1, *(1 for _ in distances.shape)) for x in (self.w, self.v))
        # log(1 + exp(v)) - log(1 + exp(v - R)), of which the exponential is the quotient
        return torch.exp(F.softplus(v) - F.softplus(v - w * distances.abs()))
