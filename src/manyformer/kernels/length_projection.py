"""From many tokens to few slots, along the length: learned, pooled or convolved (Wang et al. 2020, section 4)."""

from abc import ABC, abstractmethod
from typing import Any, Literal, NamedTuple, final

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F


class ProjectedSlots(NamedTuple):
    """What the tokens of each document became; `filled` says which slots stand for any token, None is all of them."""

    x: Float[Tensor, "n g k e"]
    filled: Bool[Tensor, "n k"] | None = None


class LengthProjection(nn.Module, ABC):
    """At most `slots` mixtures of the tokens of a document, of which there are at most `max_length`.

    What happens to a token is a matter of its position. Absent tokens are zeros, and `count` says how many tokens
    there are at each position of each document, None that there is one everywhere. One module may serve keys and
    values, and several layers.
    """

    def __init__(self, max_length: int, slots: int) -> None:
        super().__init__()
        for name, value in (("max_length", max_length), ("slots", slots)):
            if value < 1:
                raise ValueError(f"{type(self).__name__}: {name} ({value}) must be at least 1")
        if slots > max_length:
            raise ValueError(f"{type(self).__name__}: {slots} slots for at most {max_length} tokens are no reduction")
        self.max_length, self.slots = max_length, slots

    @abstractmethod
    def forward(self, x: Float[Tensor, "n g p e"], count: Int[Tensor, "n p"] | None = None) -> ProjectedSlots: ...

    def extra_repr(self) -> str:
        return f"{self.max_length} tokens to {self.slots}"


@final
class LearnedLengthProjection(LengthProjection):
    """A learned weight for each slot and position, for all heads or, with `heads`, for each (section 4).

    They start as in the published code: Glorot's uniform distribution, smaller by sqrt(2). A shorter document uses the
    first columns, and all slots.
    """

    def __init__(self, max_length: int, slots: int, *, heads: int = 1) -> None:
        super().__init__(max_length, slots)
        self.weight = nn.Parameter(torch.empty(heads, slots, max_length))
        for weight in self.weight:
            nn.init.xavier_uniform_(weight.data, gain=0.5**0.5)

    def forward(self, x: Float[Tensor, "n g p e"], count: Int[Tensor, "n p"] | None = None) -> ProjectedSlots:
        weight = self.weight[:, :, : x.shape[2]]
        if weight.shape[0] > 1:
            return ProjectedSlots(weight @ x)
        # channels of all heads and documents side by side are one product, and heads lie side by side in memory already
        channels: Any = rearrange(x, "n g p e -> p (n g e)")
        mixed: Any = rearrange(weight[0] @ channels, "k (n g e) -> n g k e", n=x.shape[0], g=x.shape[1])
        return ProjectedSlots(mixed)


@final
class PooledLengthProjection(LengthProjection):
    """The mean or the largest of each stretch of longest / slots tokens, channel by channel; nothing to learn."""

    def __init__(self, max_length: int, slots: int, *, by: Literal["mean", "max"] = "mean") -> None:
        super().__init__(max_length, slots)
        self.by = by

    def forward(self, x: Float[Tensor, "n g p e"], count: Int[Tensor, "n p"] | None = None) -> ProjectedSlots:
        stretches, there = _stretches(x, count, self)
        filled = (there > 0).any(-1)
        if self.by == "max":
            hidden = (there == 0)[:, None, ..., None]
            largest = stretches.masked_fill(hidden, -torch.inf).amax(3)
            return ProjectedSlots(largest.masked_fill(~filled[:, None, :, None], 0.0), _unless_all(filled, count))
        total = there.sum(-1).clamp(min=1)[:, None, :, None]
        return ProjectedSlots(stretches.sum(3) / total, _unless_all(filled, count))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, by={self.by}"


@final
class ConvolvedLengthProjection(LengthProjection):
    """A convolution whose width and stride are longest / slots, channel by channel, for all heads or for each.

    It starts as the mean of each stretch.
    """

    def __init__(self, max_length: int, slots: int, *, key: int, heads: int = 1) -> None:
        super().__init__(max_length, slots)
        width = _width(self)
        self.weight = nn.Parameter(torch.full((heads, width, key), 1 / width))

    def forward(self, x: Float[Tensor, "n g p e"], count: Int[Tensor, "n p"] | None = None) -> ProjectedSlots:
        stretches, there = _stretches(x, count, self)
        mixed = (stretches * self.weight[:, None]).sum(3)
        return ProjectedSlots(mixed, _unless_all((there > 0).any(-1), count))


def _width(lengthwise: LengthProjection) -> int:
    return -(-lengthwise.max_length // lengthwise.slots)


def _stretches(
    x: Float[Tensor, "n g p e"], count: Int[Tensor, "n p"] | None, lengthwise: LengthProjection
) -> tuple[Float[Tensor, "n g k w e"], Int[Tensor, "n k w"]]:
    """Tokens, and how many there are at each position, in stretches of a slot's width; the last is filled up."""
    width = _width(lengthwise)
    if count is None:
        count = torch.ones(1, x.shape[2], dtype=torch.long, device=x.device).expand(x.shape[0], -1)
    extra = -x.shape[2] % width
    x, count = F.pad(x, (0, 0, 0, extra)), F.pad(count, (0, extra))
    return x.reshape(*x.shape[:2], -1, width, x.shape[3]), count.reshape(count.shape[0], -1, width)


def _unless_all(filled: Tensor, count: Tensor | None) -> Tensor | None:
    return None if count is None else filled
