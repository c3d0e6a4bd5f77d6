"""How far each head looks back: a number that is learned, one for each token, or always the same."""

import math
from abc import ABC, abstractmethod
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.training_hooks import OwnOptimizerEpsilon, PostStepUpdate


class AttentionSpans(nn.Module, ABC):
    """Lengths z of the spans of heads, from 0 to `max_length`; a ramp over `ramp` more keys lies beyond each.

    `query_dim` numbers a token and head are asked of the stream. Sukhbaatar et al. 2019 (arXiv:1905.07799), section 2.
    """

    query_dim: int = 0

    def __init__(self, heads: int, max_length: int, *, ramp: int) -> None:
        super().__init__()
        if max_length < 1 or ramp < 2:
            raise ValueError(
                f"{type(self).__name__}: longest ({max_length}) must be at least 1, ramp ({ramp}) at least 2: with less, "
                "a span of 0 would see nothing and could not grow"
            )
        self.heads, self.max_length, self.ramp = heads, max_length, ramp

    @abstractmethod
    def forward(self, asked: Float[Tensor, "b h l n"]) -> Float[Tensor, "#b h #l"]:
        """The lengths, for each query where they differ."""

    @abstractmethod
    def max_reach(self) -> int:
        """How many keys before it any query of any head may see, as things stand."""

    def reach(self, lengths: Float[Tensor, "#b h #l"]) -> list[int]:
        """How many keys each head sees at most: those whose weight on the ramp is above 0."""
        most: list[float] = lengths.detach().amax((0, 2)).tolist()
        return [min(self.max_length, math.ceil(length + self.ramp) - 1) for length in most]

    def extra_repr(self) -> str:
        return f"{self.heads} heads, up to {self.max_length}, ramp={self.ramp}"


@final
class FixedAttentionSpans(AttentionSpans):
    """All heads always look back as far as they may."""

    def __init__(self, heads: int, max_length: int, *, ramp: int = 32) -> None:
        super().__init__(heads, max_length, ramp=ramp)
        self.register_buffer("lengths", torch.full((1, heads, 1), float(max_length)), persistent=False)
        self.lengths: Tensor

    def forward(self, asked: Float[Tensor, "b h l n"]) -> Float[Tensor, "#b h #l"]:
        return self.lengths

    def max_reach(self) -> int:
        return self.max_length


@final
class LearnedAttentionSpans(AttentionSpans, PostStepUpdate, OwnOptimizerEpsilon):
    """One number for each head, kept as a share of `max_length`, which begins at `begin`.

    It is kept between 0 and 1 by clipping after each step, and where it is used: an average or a file of weights need
    not be within. A gradient reaches it only from keys on the ramp: a span does not grow to what is beyond, so begin
    with what is needed, or with a long ramp. Adam takes equal steps however small a gradient is, so that the smallest
    penalty would pull all spans to 0; here the gradient is followed as it is (see `OwnOptimizerEpsilon`).
    """

    def __init__(self, heads: int, max_length: int, *, ramp: int = 32, begin: float = 0.0) -> None:
        super().__init__(heads, max_length, ramp=ramp)
        if not 0 <= begin <= 1:
            raise ValueError(f"LearnedAttentionSpans: begin ({begin}) is a share of the longest span, from 0 to 1")
        self.share = nn.Parameter(torch.full((heads,), float(begin)))

    def after_step(self, step: int) -> None:
        self.share.clamp_(0, 1)

    def forward(self, asked: Float[Tensor, "b h l n"]) -> Float[Tensor, "#b h #l"]:
        return (self.share.clamp(0, 1) * self.max_length)[None, :, None]

    def max_reach(self) -> int:
        return max(self.reach(self.share.clamp(0, 1)[None, :, None] * self.max_length))


@final
class DynamicAttentionSpans(AttentionSpans):
    """Each token's own: `max_length` times a sigmoid of the stream (section 2, "dynamic attention span").

    The weights v are those of the attention's queries, `begin` is the share that the bias b starts from.
    """

    query_dim = 1

    def __init__(self, heads: int, max_length: int, *, ramp: int = 32, begin: float = 0.5) -> None:
        super().__init__(heads, max_length, ramp=ramp)
        if not 0 < begin < 1:
            raise ValueError(
                f"DynamicAttentionSpans: begin ({begin}) must be above 0 and below 1: a sigmoid is never at its ends"
            )
        self.bias = nn.Parameter(torch.full((heads, 1), math.log(begin / (1 - begin))))

    def forward(self, asked: Float[Tensor, "b h l n"]) -> Float[Tensor, "#b h #l"]:
        return self.max_length * torch.sigmoid(asked[..., 0] + self.bias)

    def max_reach(self) -> int:
        return self.max_length
