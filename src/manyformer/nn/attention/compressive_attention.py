"""The Compressive Transformer: attention to recent tokens and to compressed slots of older tokens.

The slots are made by a compression function, which is trained by an auxiliary loss of its own.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.func import functional_call

from manyformer.nn.attention.attention import Attention, split_heads
from manyformer.nn.attention.kv_cache.segment_memory import PrefixSource
from manyformer.nn.core import (
    PADDING_SEGMENT,
    Context,
    Layer,
    LayerOutput,
    MemorySequence,
    State,
    TokenPositions,
    ValueRecorder,
    no_watch,
)
from manyformer.nn.ops.softmax_attention import masked_softmax, region_shares
from manyformer.nn.runtime.torch_internals import is_plain
from manyformer.nn.runtime.training_hooks import StatefulAcrossBatches


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
        # zeros before the first token, as far as the first slot reaches back
        padded = F.pad(tokens.x.mT, (self.receptive_field - self.rate, 0))
        return MemorySlots(self.conv(padded).mT, slot_segments(tokens.segment_ids, self.rate, self.receptive_field))


@final
class MostAttendedCompression(MemoryCompression):
    """The tokens that received most attention in the current step, in their order; all others are discarded."""

    needs_attention = True

    def forward(self, tokens: MemorySlots, attention: Float[Tensor, "b n"] | None = None) -> MemorySlots:
        assert attention is not None
        slot_count = tokens.x.shape[1] // self.rate
        # sorted again by their place
        chosen = attention.topk(slot_count, dim=1).indices.sort(dim=1).values
        rows = torch.arange(len(chosen), device=chosen.device)[:, None]
        return MemorySlots(tokens.x[rows, chosen], tokens.segment_ids[rows, chosen])


def _windows(x: Float[Tensor, "b n d"], rate: int) -> Float[Tensor, "b s rate d"]:
    return x.reshape(x.shape[0], -1, rate, x.shape[2])


def slot_segments(segment_ids: Int[Tensor, "b n"], rate: int, receptive_field: int) -> Int[Tensor, "b s"]:
    """The segment of each slot of `rate` tokens; `PADDING_SEGMENT` if its receptive field spans several segments."""
    # what lies before the first token counts as a part of its document, so that its slot is kept
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
        # as many tokens for each slot as it was made of
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
    # no kernel: positions and masks of the layer have no part in this loss
    outputs = masked_softmax(q @ k.mT / math.sqrt(key_dim), visible[:, None]).to(v.dtype) @ v
    return outputs.transpose(1, 2).flatten(2), visible.any(-1)


def _call_frozen(module: nn.Module, x: Tensor) -> Tensor:
    """Call the module with gradients for `x` but not for its weights."""
    # `torch.jit.trace` cannot follow the call of a module with other weights
    if is_plain(module, nn.Linear):
        return F.linear(x, module.weight.detach(), None if module.bias is None else module.bias.detach())
    weights = {name: weight.detach() for name, weight in module.named_parameters()}
    output: Tensor = functional_call(module, weights, (x,))
    return output


def _mean_square(difference: Float[Tensor, "b n d"], counted: Bool[Tensor, "b n"]) -> Tensor:
    squares = difference.to(torch.promote_types(difference.dtype, torch.float32)).square().mean(-1)
    return (squares * counted).sum() / counted.sum().clamp(min=1)


class CompressiveState(NamedTuple):
    """Previous inputs of the layer: `memory` uncompressed, older ones as `slots`, oldest first.

    `latest` are the tokens of the latest slots if `CompressionLoss.next_step_gradients`, else empty."""

    memory: MemorySlots
    slots: MemorySlots
    latest: MemorySlots


@final
class CompressiveAttention(Layer, StatefulAcrossBatches):
    """The Compressive Transformer's attention (Rae et al. 2020, arXiv:1911.05507, section 3 and algorithm 1).

    `attention`, whose source must be `PrefixSource`, attends to `compressed_length` slots, then `memory_length` tokens,
    then the current segment. After each call the oldest tokens beyond `memory_length` are compressed into slots, in
    multiples of `block` (by default the rate of the compression), so that segments may have any length; tokens of an
    incomplete block stay in the memory. Both memories start empty, where the paper's are filled with zeros. Positions
    count slots as tokens. Memories get no gradient, and slots are computed outside of the task's loss: a compression
    learns from its `teacher` alone. The watched value "slot_count" is the number of slots that were attended to, and
    "mass" holds the shares of attention to slots, memory and segment."""

    regions = ("slots", "memory", "segment")

    def __init__(
        self,
        attention: Attention,
        compression: MemoryCompression,
        *,
        memory_length: int,
        compressed_length: int,
        teacher: CompressionLoss | None = None,
        block: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(attention.source, PrefixSource):
            raise ValueError(
                f"CompressiveAttention: the source must be PrefixSource(), not {type(attention.source).__name__}"
            )
        block = compression.rate if block is None else block
        if block < 1 or block % compression.rate:
            raise ValueError(
                f"CompressiveAttention: block ({block}) must be a multiple of the rate ({compression.rate})"
            )
        if min(memory_length, compressed_length) < 1:
            raise ValueError(
                f"CompressiveAttention: memory_length ({memory_length}) and compressed_length ({compressed_length}) "
                "must be at least 1"
            )
        self.attention = attention
        self.dim = attention.kv_proj.in_features
        self.compression = compression
        self.teacher = teacher
        self.memory_length = memory_length
        self.compressed_length = compressed_length
        self.block = block

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        x = torch.zeros(batch, 0, self.dim, device=device, dtype=dtype)
        empty = MemorySlots(x, torch.zeros(batch, 0, dtype=torch.long, device=device))
        return CompressiveState(empty, empty, empty)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        batch = x.shape[0]
        if state is None:
            previous: CompressiveState = self.init_state(batch, device=x.device, dtype=x.dtype)
        else:
            previous = state
        slots = self._slots(previous)
        memory_length = previous.memory.x.shape[1]
        memories = slots.append(previous.memory)
        prefix = MemorySequence(memories.x.to(x.dtype), _preceding_positions(memories.segment_ids, ctx.positions))
        # the oldest tokens beyond the memory, in complete blocks
        evicted_count = max(0, memory_length + x.shape[1] - self.memory_length) // self.block * self.block
        trains_compression = self.teacher is not None and torch.is_grad_enabled()
        compresses = evicted_count > 0 and (state is not None or trains_compression)
        needs_weights = compresses and self.compression.needs_attention
        # the weights are those that the kernel reports: it need not know of compression
        recorder = ValueRecorder(self.attention.kernel, "weights", ctx.watch)
        watch = recorder if needs_weights or ctx.watch is not no_watch else no_watch
        # the attention itself keeps no state: both memories are given to it as a prefix
        y, _, loss = self.attention(x, replace(ctx, memory=prefix, watch=watch), None)
        weights = None
        if recorder.values:
            weights = recorder.values[-1].detach()
        self._report(weights, ctx, slots.x.shape[1], memory_length)
        if state is None and not trains_compression:
            return LayerOutput(y, None, loss)
        # detached: memories get no gradient of later segments
        inputs = MemorySlots(x.detach(), ctx.positions.segment_ids.expand(batch, -1))
        tokens = previous.memory._replace(x=previous.memory.x.to(x.dtype)).append(inputs)
        evicted = tokens.columns(slice(evicted_count))
        remaining = tokens.columns(slice(evicted_count, None))
        received = None
        if needs_weights and weights is not None:
            # the mean attention that each token to compress got, over heads and queries
            received = weights[..., slots.x.shape[1] : slots.x.shape[1] + evicted_count].mean((1, 2))
        new_slots = None
        if evicted_count:
            new_slots = self.compression(evicted, received)
        if new_slots is not None and self.teacher is not None and trains_compression:
            loss = loss + self.teacher(self.attention, inputs, evicted, new_slots)
        if state is None:
            return LayerOutput(y, None, loss)
        slots = slots.detach()
        if new_slots is not None:
            slots = slots.append(new_slots.detach()).columns(slice(-self.compressed_length, None))
        keeps_latest = self.teacher is not None and self.teacher.next_step_gradients and self.training
        # no columns at all where nobody will compute these slots once more
        latest = evicted.columns(slice(evicted_count if keeps_latest else 0))
        return LayerOutput(y, CompressiveState(remaining, slots, latest), loss)

    def _slots(self, previous: CompressiveState) -> MemorySlots:
        """The slots to attend to; the latest are recomputed if they get gradients from this step."""
        slots = previous.slots
        if not previous.latest.x.shape[1] or not torch.is_grad_enabled():
            return slots
        # the same numbers again, this time with a gradient for the compression
        recomputed = self.compression(previous.latest).x[:, -slots.x.shape[1] :]
        earlier = slots.x[:, : slots.x.shape[1] - recomputed.shape[1]]
        return slots._replace(x=torch.cat([earlier, recomputed], 1))

    def _report(
        self, weights: Float[Tensor, "b h l s"] | None, ctx: Context, slot_count: int, memory_length: int
    ) -> None:
        if ctx.watch is not no_watch and weights is not None:
            valid = (ctx.positions.segment_ids != PADDING_SEGMENT).expand(len(weights), -1)
            segment_length = weights.shape[-1] - slot_count - memory_length
            ctx.watch(self, "slot_count", torch.tensor(slot_count))
            ctx.watch(self, "mass", region_shares(weights, [slot_count, memory_length, segment_length], valid))

    def extra_repr(self) -> str:
        return f"memory_length={self.memory_length}, compressed_length={self.compressed_length}, block={self.block}"


def _preceding_positions(segment_ids: Int[Tensor, "b m"], positions: TokenPositions) -> TokenPositions:
    """Positions directly before the first valid token of each row, one per memory entry."""
    # the first maximum is the first column that is not padding
    first_column = (positions.segment_ids != PADDING_SEGMENT).byte().argmax(1, keepdim=True)
    rows, count = segment_ids.shape
    first_position = positions.position_ids.expand(rows, -1).gather(1, first_column.expand(rows, -1))
    return TokenPositions(first_position + torch.arange(-count, 0, device=segment_ids.device), segment_ids)
