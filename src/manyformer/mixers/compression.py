"""Memory compression of the Compressive Transformer: its compression functions and their auxiliary losses."""

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
from manyformer.ops.softmax_attention import masked_softmax


class MemorySlots(NamedTuple):
    """Vectors of tokens or of compressed slots, with their segment ids."""

    x: Float[Tensor, "b n d"]
    segment_ids: Int[Tensor, "b n"]

    def columns(self, columns: slice) -> "MemorySlots":
        """The vectors in these columns."""
        return MemorySlots(self.x[:, columns], self.segment_ids[:, columns])

    def append(self, newer: "MemorySlots") -> "MemorySlots":
        """These vectors followed by `newer` ones."""
        return MemorySlots(torch.cat([self.x, newer.x], 1), torch.cat([self.segment_ids, newer.segment_ids], 1))

    def detach(self) -> "MemorySlots":
        """The vectors without gradients."""
        return self._replace(x=self.x.detach())


class MemoryCompression(nn.Module, ABC):
    """Compresses every `rate` tokens into one slot (Rae et al. 2020, arXiv:1911.05507, section 3.2).

    Slots of several documents, or of padding, get the segment `PADDING_SEGMENT`."""

    needs_attention: bool = False
    """Whether `forward` needs the mean attention weight that each token received."""

    def __init__(self, rate: int) -> None:
        super().__init__()
        if rate < 1:
            raise ValueError(f"{type(self).__name__}: rate ({rate}) must be at least 1 token per slot")
        self.rate = rate

    @abstractmethod
    def forward(self, tokens: MemorySlots, attention: Float[Tensor, "b n"] | None = None) -> MemorySlots:
        """Compress `tokens`, whose number must be a multiple of `rate`."""

    def extra_repr(self) -> str:
        return f"rate={self.rate}"


@final
class MaxPoolCompression(MemoryCompression):
    """The maximum of each channel."""

    def forward(self, tokens: MemorySlots, attention: Float[Tensor, "b n"] | None = None) -> MemorySlots:
        slots = _windows(tokens.x, self.rate).amax(2)
        return MemorySlots(slots, slot_segments(tokens.segment_ids, self.rate, self.rate))


@final
class MeanPoolCompression(MemoryCompression):
    """The mean of each channel."""

    def forward(self, tokens: MemorySlots, attention: Float[Tensor, "b n"] | None = None) -> MemorySlots:
        slots = _windows(tokens.x, self.rate).mean(2)
        return MemorySlots(slots, slot_segments(tokens.segment_ids, self.rate, self.rate))


@final
class ConvolutionCompression(MemoryCompression):
    """A convolution of `rate` taps with stride `rate`; with `dilation` its receptive field reaches earlier tokens.

    The paper gives no initialization: here the convolution starts as the mean of its taps. Nor does it define its
    dilated convolutions: here one of `rate` taps, the last of which is the last token of the slot.
    """

    def __init__(self, dim: int, rate: int, *, dilation: int = 1) -> None:
        super().__init__(rate)
        self.receptive_field = (rate - 1) * dilation + 1
        self.conv = nn.Conv1d(dim, dim, rate, stride=rate, dilation=dilation)
        with torch.no_grad():
            self.conv.weight.copy_(torch.eye(dim)[:, :, None].expand(-1, -1, rate) / rate)
            self.conv.bias.zero_()  # type: ignore[union-attr]

    def forward(self, tokens: MemorySlots, attention: Float[Tensor, "b n"] | None = None) -> MemorySlots:
        padded = F.pad(tokens.x.mT, (self.receptive_field - self.rate, 0))
        return MemorySlots(self.conv(padded).mT, slot_segments(tokens.segment_ids, self.rate, self.receptive_field))


@final
class MostAttendedCompression(MemoryCompression):
    """The tokens that received most attention in the current step, in their order; all others are discarded."""

    needs_attention = True

    def forward(self, tokens: MemorySlots, attention: Float[Tensor, "b n"] | None = None) -> MemorySlots:
        assert attention is not None
        slot_count = tokens.x.shape[1] // self.rate
        chosen = attention.topk(slot_count, dim=1).indices.sort(dim=1).values
        rows = torch.arange(len(chosen), device=chosen.device)[:, None]
        return MemorySlots(tokens.x[rows, chosen], tokens.segment_ids[rows, chosen])


def _windows(x: Float[Tensor, "b n d"], rate: int) -> Float[Tensor, "b s rate d"]:
    return x.reshape(x.shape[0], -1, rate, x.shape[2])


def slot_segments(segment_ids: Int[Tensor, "b n"], rate: int, receptive_field: int) -> Int[Tensor, "b s"]:
    """The segment of each slot of `rate` tokens; `PADDING_SEGMENT` if its receptive field spans several segments."""
    padding = segment_ids[:, :1].expand(-1, receptive_field - rate)
    windows = torch.cat([padding, segment_ids], 1).unfold(1, receptive_field, rate)
    return torch.where((windows == windows[..., -1:]).all(-1), windows[..., -1], PADDING_SEGMENT)


class CompressionLoss(nn.Module, ABC):
    """The training signal of a compression."""

    next_step_gradients: bool = False
    """Whether slots get gradients of the task's loss in the next step, in which they are attended to."""

    @abstractmethod
    def forward(self, attention: Attention, inputs: MemorySlots, tokens: MemorySlots, slots: MemorySlots) -> Tensor:
        """An auxiliary loss of `slots`, compressed from `tokens`, for queries `inputs`; only `slots` get gradients."""


@final
class AutoEncodingLoss(CompressionLoss):
    """|| tokens - g(slots) ||: a learned decoder g reconstructs the tokens from their slot (section 3.2, L_ae).

    The mean square over the channels of all tokens in slots of a single document.
    """

    def __init__(self, dim: int, rate: int) -> None:
        super().__init__()
        self.decoder = nn.ConvTranspose1d(dim, dim, rate, stride=rate)

    def forward(self, attention: Attention, inputs: MemorySlots, tokens: MemorySlots, slots: MemorySlots) -> Tensor:
        reconstruction = self.decoder(slots.x.mT).mT
        counted = (slots.segment_ids != PADDING_SEGMENT).repeat_interleave(tokens.x.shape[1] // slots.x.shape[1], 1)
        return _mean_square(reconstruction - tokens.x.detach(), counted)


@final
class AttentionReconstructionLoss(CompressionLoss):
    """|| attend(inputs, tokens) - attend(inputs, slots) ||: attention to slots reconstructs that to tokens (L_ar).

    Algorithm 2 of the paper: content-based attention without positions, with the layer's projections frozen. The mean
    square over the channels of all queries that see keys of their document in both.
    """

    def forward(self, attention: Attention, inputs: MemorySlots, tokens: MemorySlots, slots: MemorySlots) -> Tensor:
        with_tokens, sees_tokens = _content_attention(attention, inputs, tokens.detach())
        with_slots, sees_slots = _content_attention(attention, inputs, slots)
        return _mean_square(with_slots - with_tokens.detach(), sees_tokens & sees_slots)


@final
class ThroughTimeLoss(CompressionLoss):
    """The task's loss in the step in which slots are first attended to ("BPTT" in the paper); no auxiliary loss."""

    next_step_gradients = True

    def forward(self, attention: Attention, inputs: MemorySlots, tokens: MemorySlots, slots: MemorySlots) -> Tensor:
        return inputs.x.new_zeros(())


def _content_attention(
    attention: Attention, queries: MemorySlots, memory: MemorySlots
) -> tuple[Float[Tensor, "b l hf"], Bool[Tensor, "b l"]]:
    """Content-based softmax attention with frozen projections, and whether each query sees any key."""
    assert attention.q_proj is not None
    heads, key_dim, value_dim = attention.kv_shape
    x, y = (
        vectors if attention.pre_norm is None else _call_frozen(attention.pre_norm, vectors)
        for vectors in (queries.x.detach(), memory.x)
    )
    q = split_heads(_call_frozen(attention.q_proj, x), attention.heads)
    parts = torch.split(_call_frozen(attention.kv_proj, y), [heads * key_dim, heads * value_dim], dim=-1)
    k, v = (split_heads(part, heads).repeat_interleave(attention.heads // heads, 1) for part in parts)
    key_segments = memory.segment_ids[:, None, :]
    visible = (queries.segment_ids[:, :, None] == key_segments) & (key_segments != PADDING_SEGMENT)
    outputs = masked_softmax(q @ k.mT / math.sqrt(key_dim), visible[:, None]).to(v.dtype) @ v
    return outputs.transpose(1, 2).flatten(2), visible.any(-1)


def _call_frozen(module: nn.Module, x: Tensor) -> Tensor:
    """Call the module with gradients for `x` but not for its weights."""
    weights = {name: weight.detach() for name, weight in module.named_parameters()}
    output: Tensor = functional_call(module, weights, (x,))
    return output


def _mean_square(difference: Float[Tensor, "b n d"], counted: Bool[Tensor, "b n"]) -> Tensor:
    squares = difference.to(torch.promote_types(difference.dtype, torch.float32)).square().mean(-1)
    return (squares * counted).sum() / counted.sum().clamp(min=1)
