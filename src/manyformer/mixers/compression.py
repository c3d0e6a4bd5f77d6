"""How old memories become fewer: the five functions of the Compressive Transformer, and how they may learn."""

import math
from abc import ABC, abstractmethod
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.func import functional_call

from manyformer.attention import Attention, split_heads
from manyformer.core import PADDING_SEGMENT
from manyformer.ops.softmax_attention import weights_of


class MemorySlots(NamedTuple):
    """Some tokens, or what has become of them: vectors, and the documents that they belong to."""

    x: Float[Tensor, "b n d"]
    seg: Int[Tensor, "b n"]


class MemoryCompression(nn.Module, ABC):
    """Makes one slot of every `rate` tokens (Rae et al. 2020, arXiv:1911.05507, section 3.2).

    Slots of tokens of several documents, or of padding, belong to none. `needs_attention` for how much attention each
    token got."""

    needs_attention: bool = False

    def __init__(self, rate: int) -> None:
        super().__init__()
        if rate < 1:
            raise ValueError(f"{type(self).__name__}: rate ({rate}) must be at least 1 token a slot")
        self.rate = rate

    @abstractmethod
    def forward(self, old: MemorySlots, received: Float[Tensor, "b n"] | None = None) -> MemorySlots:
        """One slot for every `rate` of the tokens, whose number must be a multiple of it."""

    def extra_repr(self) -> str:
        return f"rate={self.rate}"


@final
class MaxPoolCompression(MemoryCompression):
    """The largest of each channel."""

    def forward(self, old: MemorySlots, received: Float[Tensor, "b n"] | None = None) -> MemorySlots:
        return MemorySlots(_windows(old.x, self.rate).amax(2), common(old.seg, self.rate, self.rate))


@final
class MeanPoolCompression(MemoryCompression):
    """The mean."""

    def forward(self, old: MemorySlots, received: Float[Tensor, "b n"] | None = None) -> MemorySlots:
        return MemorySlots(_windows(old.x, self.rate).mean(2), common(old.seg, self.rate, self.rate))


@final
class ConvolutionCompression(MemoryCompression):
    """A convolution as wide as its stride, `rate`; with `dilation` a slot also looks further back, with gaps.

    The paper does not tell the start: here it is the mean of the tokens looked at. Nor does it tell what its dilated
    convolutions are: here one of `rate` weights a slot, whose last token is the last one of the slot.
    """

    def __init__(self, dim: int, rate: int, *, dilation: int = 1) -> None:
        super().__init__(rate)
        self.field = (rate - 1) * dilation + 1
        self.inner = nn.Conv1d(dim, dim, rate, stride=rate, dilation=dilation)
        with torch.no_grad():
            self.inner.weight.copy_(torch.eye(dim)[:, :, None].expand(-1, -1, rate) / rate)
            self.inner.bias.zero_()  # type: ignore[union-attr]

    def forward(self, old: MemorySlots, received: Float[Tensor, "b n"] | None = None) -> MemorySlots:
        padded = F.pad(old.x.mT, (self.field - self.rate, 0))
        return MemorySlots(self.inner(padded).mT, common(old.seg, self.rate, self.field))


@final
class MostAttendedCompression(MemoryCompression):
    """The tokens that got most attention lately, in their order; all others are forgotten."""

    needs_attention = True

    def forward(self, old: MemorySlots, received: Float[Tensor, "b n"] | None = None) -> MemorySlots:
        assert received is not None
        kept = old.x.shape[1] // self.rate
        chosen = received.topk(kept, dim=1).indices.sort(dim=1).values
        rows = torch.arange(len(chosen), device=chosen.device)[:, None]
        return MemorySlots(old.x[rows, chosen], old.seg[rows, chosen])


def _windows(x: Float[Tensor, "b n d"], rate: int) -> Float[Tensor, "b s rate d"]:
    return x.reshape(x.shape[0], -1, rate, x.shape[2])


def common(seg: Int[Tensor, "b n"], rate: int, field: int) -> Int[Tensor, "b s"]:
    """The document of each slot of `rate` tokens that looks at `field` ones; `PADDING_SEGMENT` where that is not one
    alone.
    """
    ahead = seg[:, :1].expand(-1, field - rate)
    looked = torch.cat([ahead, seg], 1).unfold(1, field, rate)
    return torch.where((looked == looked[..., -1:]).all(-1), looked[..., -1], PADDING_SEGMENT)


class CompressionLoss(nn.Module, ABC):
    """What a compression learns from. `next_step_gradients` asks for gradients of the task's loss one step later."""

    next_step_gradients: bool = False

    @abstractmethod
    def forward(self, attention: Attention, at: MemorySlots, old: MemorySlots, new: MemorySlots) -> Tensor | float:
        """An auxiliary loss for `new`, made of `old`, when `at` is what attends; gradients reach nothing but `new`."""


@final
class AutoEncodingLoss(CompressionLoss):
    """|| old - g(new) ||: a decoder g, learned as well, is to tell the tokens from their slot (section 3.2, L_ae).

    As a mean of squares over the channels of all tokens in slots of one document.
    """

    def __init__(self, dim: int, rate: int) -> None:
        super().__init__()
        self.decoder = nn.ConvTranspose1d(dim, dim, rate, stride=rate)

    def forward(self, attention: Attention, at: MemorySlots, old: MemorySlots, new: MemorySlots) -> Tensor | float:
        told = self.decoder(new.x.mT).mT
        whole = (new.seg != PADDING_SEGMENT).repeat_interleave(old.x.shape[1] // new.x.shape[1], 1)
        return _mean_square(told - old.x.detach(), whole)


@final
class AttentionReconstructionLoss(CompressionLoss):
    """|| attend(at, old) - attend(at, new) ||: attention is to find in the slots what it finds in the tokens (L_ar).

    Algorithm 2 of the paper: by content alone, without positions, with the layer's projections as they are. As a mean
    of squares over the channels of all queries that see something of their own document in both.
    """

    def forward(self, attention: Attention, at: MemorySlots, old: MemorySlots, new: MemorySlots) -> Tensor | float:
        with_tokens, some = _attend(attention, at, MemorySlots(old.x.detach(), old.seg))
        with_slots, others = _attend(attention, at, new)
        return _mean_square(with_slots - with_tokens.detach(), some & others)


@final
class ThroughTimeLoss(CompressionLoss):
    """No loss of its own: the task's loss of the step in which slots are first attended to ("BPTT" in the paper)."""

    next_step_gradients = True

    def forward(self, attention: Attention, at: MemorySlots, old: MemorySlots, new: MemorySlots) -> Tensor | float:
        return 0.0


def _attend(
    attention: Attention, at: MemorySlots, to: MemorySlots
) -> tuple[Float[Tensor, "b l hf"], Bool[Tensor, "b l"]]:
    """Softmax attention by content alone, the weights of the layer taken for numbers; and who sees anything."""
    assert attention.q_proj is not None
    heads, key, value = attention.kv_shape
    x, y = (each if attention.pre_norm is None else _still(attention.pre_norm, each) for each in (at.x.detach(), to.x))
    q = split_heads(_still(attention.q_proj, x), attention.heads)
    parts = torch.split(_still(attention.kv_proj, y), [heads * key, heads * value], dim=-1)
    k, v = (split_heads(part, heads).repeat_interleave(attention.heads // heads, 1) for part in parts)
    seen = (at.seg[:, :, None] == to.seg[:, None, :]) & (to.seg[:, None, :] != PADDING_SEGMENT)
    found = weights_of(q @ k.mT / math.sqrt(key), seen[:, None]).to(v.dtype) @ v
    return found.transpose(1, 2).flatten(2), seen.any(-1)


def _still(module: nn.Module, x: Tensor) -> Tensor:
    """What the module makes of `x`, with gradients for `x` but not for its weights."""
    weights = {name: weight.detach() for name, weight in module.named_parameters()}
    found: Tensor = functional_call(module, weights, (x,))
    return found


def _mean_square(apart: Float[Tensor, "b n d"], counted: Bool[Tensor, "b n"]) -> Tensor:
    squares = apart.to(torch.promote_types(apart.dtype, torch.float32)).square().mean(-1)
    return (squares * counted).sum() / counted.sum().clamp(min=1)
