"""Attention with two memories: recent tokens, and compressed slots of older tokens (Compressive Transformer)."""

from dataclasses import replace
from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.attention import Attention
from manyformer.core import (
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
from manyformer.mixers.compression import CompressionLoss, MemoryCompression, MemorySlots
from manyformer.ops.softmax_attention import region_shares
from manyformer.sources import PrefixSource
from manyformer.training_hooks import StatefulAcrossBatches


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
        self.compression = compression
        self.teacher = teacher
        self.memory_length = memory_length
        self.compressed_length = compressed_length
        self.block = block

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        x = torch.zeros(batch, 0, self.attention.kv_proj.in_features, device=device, dtype=dtype)
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
        recorder = ValueRecorder(self.attention.kernel, "weights", ctx.watch)
        watch = recorder if needs_weights or ctx.watch is not no_watch else no_watch
        y, _, loss = self.attention(x, replace(ctx, memory=prefix, watch=watch), None)
        weights = None
        if recorder.values:
            weights = recorder.values[-1].detach()
        self._report(weights, ctx, slots.x.shape[1], memory_length)
        if state is None and not trains_compression:
            return LayerOutput(y, None, loss)
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
        latest = evicted.columns(slice(evicted_count if keeps_latest else 0))
        return LayerOutput(y, CompressiveState(remaining, slots, latest), loss)

    def _slots(self, previous: CompressiveState) -> MemorySlots:
        """The slots to attend to; the latest are recomputed if they get gradients from this step."""
        slots = previous.slots
        if not previous.latest.x.shape[1] or not torch.is_grad_enabled():
            return slots
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
    first_column = (positions.segment_ids != PADDING_SEGMENT).byte().argmax(1, keepdim=True)
    rows, count = segment_ids.shape
    first_position = positions.position_ids.expand(rows, -1).gather(1, first_column.expand(rows, -1))
    return TokenPositions(first_position + torch.arange(-count, 0, device=segment_ids.device), segment_ids)
