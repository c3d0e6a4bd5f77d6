"""Projections along the length, from tokens to slots: learned, pooled or convolved (Wang et al. 2020, section 4)."""

from abc import ABC, abstractmethod
from typing import Any, Literal, NamedTuple, final

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from manyformer.head_selection import PerHeadTensors


class ProjectedSlots(NamedTuple):
    """The projected slots of each document; `filled` marks slots that any token contributes to, None means all."""

    x: Float[Tensor, "n g k e"]
    filled: Bool[Tensor, "n k"] | None = None


class LengthProjection(nn.Module, ABC):
    """Projects the at most `max_length` tokens of a document to at most `slots` slots, by position.

    Absent tokens must be zeros; `count` is the number of tokens at each position of each document, None means one
    everywhere. One module may be shared by keys and values and by several layers.
    """

    def __init__(self, max_length: int, slots: int) -> None:
        super().__init__()
        for name, value in (("max_length", max_length), ("slots", slots)):
            if value < 1:
                raise ValueError(f"{type(self).__name__}: {name} ({value}) must be at least 1")
        if slots > max_length:
            raise ValueError(f"{type(self).__name__}: slots ({slots}) must not exceed max_length ({max_length})")
        self.max_length = max_length
        self.slots = slots

    @abstractmethod
    def forward(self, x: Float[Tensor, "n g p e"], count: Int[Tensor, "n p"] | None = None) -> ProjectedSlots: ...

    def extra_repr(self) -> str:
        return f"{self.max_length} tokens to {self.slots}"


@final
class LearnedLengthProjection(LengthProjection, PerHeadTensors):
    """A learned weight for each slot and position, shared by all heads or, with `heads`, one per head (section 4).

    Initialized as in the published code: Glorot's uniform distribution, smaller by sqrt(2). A shorter document uses
    the first columns of the weight, and all slots.
    """

    head_axes = (("weight", -3),)

    def __init__(self, max_length: int, slots: int, *, heads: int = 1) -> None:
        super().__init__(max_length, slots)
        self.weight = nn.Parameter(torch.empty(heads, slots, max_length))
        for weight in self.weight:
            nn.init.xavier_uniform_(weight.data, gain=0.5**0.5)

    def forward(self, x: Float[Tensor, "n g p e"], count: Int[Tensor, "n p"] | None = None) -> ProjectedSlots:
        weight = self.weight[:, :, : x.shape[2]]
        if weight.shape[0] > 1:
            return ProjectedSlots(weight @ x)
        # one product for the channels of all heads and documents; heads are already adjacent in memory
        channels: Any = rearrange(x, "n g p e -> p (n g e)")
        mixed: Any = rearrange(weight[0] @ channels, "k (n g e) -> n g k e", n=x.shape[0], g=x.shape[1])
        return ProjectedSlots(mixed)


@final
class PooledLengthProjection(LengthProjection):
    """The mean or maximum of each window of max_length / slots tokens, channel by channel, without parameters."""

    def __init__(self, max_length: int, slots: int, *, reduction: Literal["mean", "max"] = "mean") -> None:
        super().__init__(max_length, slots)
        self.reduction = reduction

    def forward(self, x: Float[Tensor, "n g p e"], count: Int[Tensor, "n p"] | None = None) -> ProjectedSlots:
        windows, counts = _split_windows(x, count, self)
        filled = (counts > 0).any(-1)
        if self.reduction == "max":
            absent = (counts == 0)[:, None, ..., None]
            maxima = windows.masked_fill(absent, -torch.inf).amax(3)
            return ProjectedSlots(maxima.masked_fill(~filled[:, None, :, None], 0.0), _filled_or_none(filled, count))
        total = counts.sum(-1).clamp(min=1)[:, None, :, None]
        return ProjectedSlots(windows.sum(3) / total, _filled_or_none(filled, count))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, reduction={self.reduction}"


@final
class ConvolvedLengthProjection(LengthProjection, PerHeadTensors):
    """A depthwise convolution with width and stride max_length / slots, shared by all heads or one per head.

    Initialized to the mean of each window.
    """

    head_axes = (("weight", -3),)

    def __init__(self, max_length: int, slots: int, *, key_dim: int, heads: int = 1) -> None:
        super().__init__(max_length, slots)
        width = _window_width(self)
        self.weight = nn.Parameter(torch.full((heads, width, key_dim), 1 / width))

    def forward(self, x: Float[Tensor, "n g p e"], count: Int[Tensor, "n p"] | None = None) -> ProjectedSlots:
        windows, counts = _split_windows(x, count, self)
        mixed = (windows * self.weight[:, None]).sum(3)
        return ProjectedSlots(mixed, _filled_or_none((counts > 0).any(-1), count))


def _window_width(projection: LengthProjection) -> int:
    return -(-projection.max_length // projection.slots)


def _split_windows(
    x: Float[Tensor, "n g p e"], count: Int[Tensor, "n p"] | None, projection: LengthProjection
) -> tuple[Float[Tensor, "n g k w e"], Int[Tensor, "n k w"]]:
    """Split tokens, and their number at each position, into windows of one slot; the last window is padded."""
    width = _window_width(projection)
    if count is None:
        count = torch.ones(1, x.shape[2], dtype=torch.long, device=x.device).expand(x.shape[0], -1)
    padding = -x.shape[2] % width
    x = F.pad(x, (0, 0, 0, padding))
    count = F.pad(count, (0, padding))
    return x.reshape(*x.shape[:2], -1, width, x.shape[3]), count.reshape(count.shape[0], -1, width)


def _filled_or_none(filled: Tensor, count: Tensor | None) -> Tensor | None:
    if count is None:
        return None
    return filled
