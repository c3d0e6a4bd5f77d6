"""Attention spans of heads: fixed, learned for each head, or computed for each token."""

import math
from abc import ABC, abstractmethod
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.head_selection import PerHeadTensors
from manyformer.training_hooks import OwnOptimizerEpsilon, PostStepUpdate


class AttentionSpans(PerHeadTensors, ABC):
    """Span lengths z of heads, from 0 to `max_span`, each followed by a ramp over `ramp` more keys.

    Sukhbaatar et al. 2019 (arXiv:1905.07799), section 2. `query_dim` is the number of extra query channels per token
    and head that the spans are computed from.
    """

    query_dim: int = 0

    def __init__(self, heads: int, max_span: int, *, ramp: int) -> None:
        super().__init__()
        if max_span < 1 or ramp < 2:
            raise ValueError(
                f"{type(self).__name__}: max_span ({max_span}) must be at least 1 and ramp ({ramp}) at least 2: "
                "with a shorter ramp a span of 0 sees no key and gets no gradient"
            )
        self.heads = heads
        self.max_span = max_span
        self.ramp = ramp

    @abstractmethod
    def forward(self, span_queries: Float[Tensor, "b h l n"]) -> Float[Tensor, "#b h #l"]:
        """Compute the span lengths; the last axis is 1 unless they differ between queries."""

    @abstractmethod
    def max_reach(self) -> int:
        """The largest number of preceding keys that any query of any head can see with the current parameters."""

    def reach(self, lengths: Float[Tensor, "#b h #l"]) -> list[int]:
        """The largest number of keys that each head sees, i.e. keys whose ramp weight is above 0."""
        max_lengths: list[float] = lengths.detach().amax((0, 2)).tolist()
        return [min(self.max_span, math.ceil(length + self.ramp) - 1) for length in max_lengths]

    def extra_repr(self) -> str:
        return f"{self.heads} heads, up to {self.max_span}, ramp={self.ramp}"


@final
class FixedAttentionSpans(AttentionSpans):
    """Spans of all heads fixed to `max_span`."""

    head_axes = (("lengths", -2),)

    def __init__(self, heads: int, max_span: int, *, ramp: int = 32) -> None:
        super().__init__(heads, max_span, ramp=ramp)
        self.register_buffer("lengths", torch.full((1, heads, 1), float(max_span)), persistent=False)
        self.lengths: Tensor

    def forward(self, span_queries: Float[Tensor, "b h l n"]) -> Float[Tensor, "#b h #l"]:
        return self.lengths

    def max_reach(self) -> int:
        return self.max_span


@final
class LearnedAttentionSpans(AttentionSpans, PostStepUpdate, OwnOptimizerEpsilon):
    """One learned span for each head, stored as a share of `max_span` that is initialized to `initial_share`.

    The share is clipped to [0, 1] after each step, and again where it is used, because averaged or loaded weights may
    lie outside. Its gradient comes only from keys on the ramp: a span cannot grow towards keys beyond it, so start
    with the required span or with a long ramp. Adam normalizes the size of gradients away, so the smallest span loss
    would pull all spans to 0; `OwnOptimizerEpsilon` keeps steps proportional to the gradient.
    """

    head_axes = (("share", -1),)

    def __init__(self, heads: int, max_span: int, *, ramp: int = 32, initial_share: float = 0.0) -> None:
        super().__init__(heads, max_span, ramp=ramp)
        if not 0 <= initial_share <= 1:
            raise ValueError(
                f"LearnedAttentionSpans: initial_share ({initial_share}) must be a share of max_span, from 0 to 1"
            )
        self.share = nn.Parameter(torch.full((heads,), float(initial_share)))

    def after_step(self, step: int) -> None:
        self.share.clamp_(0, 1)

    def forward(self, span_queries: Float[Tensor, "b h l n"]) -> Float[Tensor, "#b h #l"]:
        return (self.share.clamp(0, 1) * self.max_span)[None, :, None]

    def max_reach(self) -> int:
        return max(self.reach(self.share.clamp(0, 1)[None, :, None] * self.max_span))


@final
class DynamicAttentionSpans(AttentionSpans):
    """One span for each token and head: `max_span` sigmoid(v.x + b) (section 2, "dynamic attention span").

    The weights v are part of the attention's query projection; b is initialized so that the sigmoid of b alone is
    `initial_share`.
    """

    query_dim = 1
    head_axes = (("bias", -2),)

    def __init__(self, heads: int, max_span: int, *, ramp: int = 32, initial_share: float = 0.5) -> None:
        super().__init__(heads, max_span, ramp=ramp)
        if not 0 < initial_share < 1:
            limits = "must be above 0 and below 1, the range of a sigmoid"
            raise ValueError(f"DynamicAttentionSpans: initial_share ({initial_share}) {limits}")
        self.bias = nn.Parameter(torch.full((heads, 1), math.log(initial_share / (1 - initial_share))))

    def forward(self, span_queries: Float[Tensor, "b h l n"]) -> Float[Tensor, "#b h #l"]:
        return self.max_span * torch.sigmoid(span_queries[..., 0] + self.bias)

    def max_reach(self) -> int:
        return self.max_span
