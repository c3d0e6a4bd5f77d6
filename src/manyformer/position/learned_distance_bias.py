"""Score biases that are learned functions of the distance and hold for every length: KERPLE and FIRE."""

import math
from typing import Literal, final, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.core import ContiguousLayout, TokenPositions
from manyformer.head_selection import PerHeadTensors
from manyformer.position.distance_terms import DistanceTerms, evaluate_distances, signed_distances
from manyformer.position.position import Keys, PairScores, Position, Queries

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
        self.raw_r1 = nn.Parameter(_inverse_softplus(r1))
        self.raw_r2 = nn.Parameter(torch.logit(r2 / 2) if variant == "power" else _inverse_softplus(r2))

    def bias(self, distances: Int[Tensor, "*p"]) -> Float[Tensor, "h *p"]:
        """The bias of each head at these distances, in float32 at least."""
        shape = (-1, *(1 for _ in distances.shape))
        compute_dtype = torch.promote_types(self.raw_r1.dtype, torch.float32)
        r1, r2 = (raw.to(compute_dtype).view(shape) for raw in (self.raw_r1, self.raw_r2))
        far = distances.abs().to(compute_dtype)
        if self.variant == "power":
            return -F.softplus(r1) * far.pow(2 * torch.sigmoid(r2))
        return -F.softplus(r1) * torch.log1p(F.softplus(r2) * far)

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
        longest = torch.maximum(query_ids.to(compute_dtype), self.length * self.length_factor.abs().to(compute_dtype))
        share = self._psi(distances.to(compute_dtype)) / (self._psi(longest) + self.epsilon)[..., None]
        hidden = self.hidden(share[..., None].to(self.hidden.weight.dtype)).relu()
        return logits + F.linear(hidden, self.output.to(hidden.dtype)).movedim(-1, 1).to(logits.dtype)

    def _psi(self, x: Float[Tensor, "*p"]) -> Float[Tensor, "*p"]:
        return torch.log1p(self.c.abs().to(x.dtype) * x)

    def extra_repr(self) -> str:
        return f"{len(self.output)} heads, length={self.length:g}"


def _inverse_softplus(x: Float[Tensor, " h"]) -> Float[Tensor, " h"]:
    return x + torch.log(-torch.expm1(-x))
