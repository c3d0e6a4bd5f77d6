"""Attention with two memories: what was lately, and fewer slots for what was before that."""

from dataclasses import replace
from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.attention import Attention
from manyformer.core import (
    PADDING_SEGMENT,
    Context,
    Layer,
    LayerOutput,
    MemorySequence,
    State,
    TokenPositions,
    no_watch,
)
from manyformer.mixers.compression import CompressionLoss, MemoryCompression, MemorySlots
from manyformer.ops.region_shares import shares
from manyformer.sources import PrefixSource
from manyformer.training_hooks import StatefulAcrossBatches


class CompressiveState(NamedTuple):
    """Inputs of the layer: `new` ones as they were, `old` ones as slots, oldest first, and the documents of both.

    `next_step_gradients` are the tokens of the latest slots, where these are to learn from the step in which they are
    attended to."""

    new: Float[Tensor, "b m d"]
    new_seg: Int[Tensor, "b m"]
    old: Float[Tensor, "b c d"]
    old_seg: Int[Tensor, "b c"]
    late: Float[Tensor, "b n d"]
    late_seg: Int[Tensor, "b n"]


@final
class CompressiveAttention(Layer, StatefulAcrossBatches):
    """The Compressive Transformer's attention (Rae et al. 2020, arXiv:1911.05507, section 3 and algorithm 1).

    `attention`, whose source must be `PrefixSource`, sees `compressed` slots, then `remembered` tokens, then its own.
    After each call the oldest tokens that are too many leave the memory as slots, in multiples of `block` (the rate of
    the compression unless given), so that a text may be read in pieces of any length; those of a started block stay a
    little longer. Both memories begin empty, where the paper's are full of zeros. Positions count slots as tokens.
    Nothing remembered gets a gradient, and slots are made outside of the task's loss: a compression learns from its
    `teacher` alone. Watched, it reports as "mass" the shares of attention that go to slots, memory and segment."""

    regions = ("slots", "memory", "segment")

    def __init__(
        self,
        attention: Attention,
        compression: MemoryCompression,
        *,
        remembered: int,
        compressed: int,
        teacher: CompressionLoss | None = None,
        block: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(attention.source, PrefixSource):
            raise ValueError(f"CompressiveAttention: the source must be After(), not {type(attention.source).__name__}")
        block = compression.rate if block is None else block
        if block < 1 or block % compression.rate:
            raise ValueError(
                f"CompressiveAttention: block ({block}) must be a multiple of the rate ({compression.rate})"
            )
        if min(remembered, compressed) < 1:
            raise ValueError(
                f"CompressiveAttention: remembered ({remembered}) and compressed ({compressed}) must be at least 1"
            )
        self.attention, self.compression, self.teacher = attention, compression, teacher
        self.remembered, self.compressed, self.block = remembered, compressed, block

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        nothing = torch.zeros(batch, 0, self.attention.kv_proj.in_features, device=device, dtype=dtype)
        nowhere = torch.zeros(batch, 0, dtype=torch.long, device=device)
        return CompressiveState(nothing, nowhere, nothing, nowhere, nothing, nowhere)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        batch = x.shape[0]
        queues: CompressiveState = self.init_state(batch, device=x.device, dtype=x.dtype) if state is None else state
        slots = self._slots(queues)
        weights = _Seen(self.attention.kernel, ctx)
        memory = MemorySlots(torch.cat([slots.x, queues.new], 1).to(x.dtype), torch.cat([slots.seg, queues.new_seg], 1))
        beside = MemorySequence(memory.x, _before(memory.seg, ctx.positions))
        leaving = self._leaving(queues.new.shape[1] + x.shape[1])
        learns = self.teacher is not None and torch.is_grad_enabled()
        asks = self.compression.needs_attention and leaving > 0 and (state is not None or learns)
        inner = replace(ctx, memory=beside, watch=weights if asks or ctx.watch is not no_watch else no_watch)
        y, _, loss = self.attention(x, inner, None)
        self._report(weights, ctx, slots.x.shape[1], queues.new.shape[1])
        if state is None and not learns:
            return LayerOutput(y, None, loss)
        here = MemorySlots(x.detach(), ctx.positions.segment_ids.expand(batch, -1))
        all_new = MemorySlots(torch.cat([queues.new.to(x.dtype), here.x], 1), torch.cat([queues.new_seg, here.seg], 1))
        leave = MemorySlots(all_new.x[:, :leaving], all_new.seg[:, :leaving])
        received = weights.received(slots.x.shape[1], leaving) if asks else None
        made = self.compression(leave, received) if leaving else None
        if made is not None and learns:
            assert self.teacher is not None
            loss = loss + self.teacher(self.attention, here, leave, made)
        return LayerOutput(y, None if state is None else self._next(queues, slots, all_new, leave, made), loss)

    def _leaving(self, tokens: int) -> int:
        """How many tokens leave the memory when there would be so many."""
        return max(0, tokens - self.remembered) // self.block * self.block

    def _slots(self, queues: CompressiveState) -> MemorySlots:
        """The slots to attend to; the latest made anew where they are to learn from this step."""
        if not queues.late.shape[1] or not torch.is_grad_enabled():
            return MemorySlots(queues.old, queues.old_seg)
        made = self.compression(MemorySlots(queues.late, queues.late_seg)).x[:, -queues.old.shape[1] :]
        return MemorySlots(torch.cat([queues.old[:, : queues.old.shape[1] - made.shape[1]], made], 1), queues.old_seg)

    def _next(
        self,
        queues: CompressiveState,
        slots: MemorySlots,
        tokens: MemorySlots,
        leave: MemorySlots,
        made: MemorySlots | None,
    ) -> CompressiveState:
        count = leave.x.shape[1]
        old, old_seg = slots.x.detach(), slots.seg
        if made is not None:
            old = torch.cat([old, made.x.detach()], 1)[:, -self.compressed :]
            old_seg = torch.cat([old_seg, made.seg], 1)[:, -self.compressed :]
        late = self.teacher is not None and self.teacher.next_step_gradients and self.training
        kept = slice(0, count if late else 0)
        return CompressiveState(
            tokens.x[:, count:], tokens.seg[:, count:], old, old_seg, leave.x[:, kept], leave.seg[:, kept]
        )

    def _report(self, seen: "_Seen", ctx: Context, slots: int, remembered: int) -> None:
        if ctx.watch is not no_watch and seen.weights is not None:
            real = (ctx.positions.segment_ids != PADDING_SEGMENT).expand(seen.weights.shape[0], -1)
            own = seen.weights.shape[-1] - slots - remembered
            ctx.watch(self, "mass", shares(seen.weights, [slots, remembered, own], real))

    def extra_repr(self) -> str:
        return f"remembered={self.remembered}, compressed={self.compressed}, block={self.block}"


class _Seen:
    """A watcher that keeps the weights of one kernel, and passes everything on."""

    def __init__(self, kernel: nn.Module, ctx: Context) -> None:
        self._kernel, self._ctx = kernel, ctx
        self.weights: Float[Tensor, "b h l s"] | None = None

    def __call__(self, module: nn.Module, name: str, value: Tensor) -> None:
        if module is self._kernel and name == "weights":
            self.weights = value.detach()
        self._ctx.watch(module, name, value)

    def received(self, first: int, count: int) -> Float[Tensor, "b n"]:
        """The attention that `count` keys from `first` on got, the mean over heads and queries."""
        assert self.weights is not None
        return self.weights[..., first : first + count].mean((1, 2))


def _before(seg: Int[Tensor, "b m"], positions: TokenPositions) -> TokenPositions:
    """Places right before the first token of each row: one position for each column."""
    first = (positions.segment_ids != PADDING_SEGMENT).byte().argmax(1, keepdim=True)
    begin = positions.position_ids.gather(1, first.expand(positions.position_ids.shape[0], -1)).expand(seg.shape[0], -1)
    return TokenPositions(begin + torch.arange(-seg.shape[1], 0, device=seg.device), seg)
