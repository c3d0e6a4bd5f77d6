"""Depth-separable convolutions along a text: neighbours in the document, wherever their columns are."""

from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.core import PADDING_SEGMENT, AlignedLayout, Context, ContiguousLayout, Layer, LayerOutput, State


class ConvolutionState(NamedTuple):
    """The last tokens of each row, as the next ones may see them."""

    x: Float[Tensor, "b n d"]
    pos: Int[Tensor, "b n"]
    seg: Int[Tensor, "b n"]


@final
class SeparableConv(Layer):
    """A weight for each channel and each of `size` neighbours, then a projection to `to` (Chollet 2017, section 2).

    Neighbours are those of the token's own document, itself among them: `causal`, itself and those before it; else as
    many on either side. Where there is none it counts as zeros. Raises ValueError for a size without a middle.
    """

    def __init__(self, dim: int, to: int, size: int, *, causal: bool) -> None:
        super().__init__()
        if size < 1 or (not causal and size % 2 == 0):
            raise ValueError(f"SeparableConv: size ({size}) must be at least 1, and odd unless causal")
        self.size, self.causal = size, causal
        self.depth = nn.Parameter(torch.randn(size, dim) / size**0.5)
        self.point = nn.Linear(dim, to)
        nn.init.xavier_uniform_(self.point.weight)
        nn.init.zeros_(self.point.bias)

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        nowhere = torch.zeros(batch, self.size - 1, dtype=torch.long, device=device)
        x = torch.zeros(*nowhere.shape, self.depth.shape[1], device=device, dtype=dtype)
        return ConvolutionState(x, nowhere, torch.full_like(nowhere, PADDING_SEGMENT))

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        if state is not None and not self.causal:
            raise ValueError("SeparableConv: a later token changes what came before it; build it causal to go on")
        pos, seg = (part.expand(x.shape[:2]) for part in (ctx.positions.position_ids, ctx.positions.segment_ids))
        order = None
        if not isinstance(ctx.positions.layout, ContiguousLayout | AlignedLayout):
            # padding between tokens of a document must not part them
            order = (seg == PADDING_SEGMENT).byte().argsort(dim=1, stable=True)
            pos, seg = pos.gather(1, order), seg.gather(1, order)
            x = x.gather(1, order[..., None].expand(x.shape))
        last = None if state is None else self._last(x, pos, seg, state)
        mixed = self._mix(x, pos, seg, state)
        if order is not None:
            mixed = torch.zeros_like(mixed).scatter(1, order[..., None].expand(mixed.shape), mixed)
        return LayerOutput(self.point(mixed), last)

    def _mix(self, x: Tensor, pos: Tensor, seg: Tensor, state: ConvolutionState | None) -> Float[Tensor, "b l d"]:
        own_pos, own_seg, length = pos, seg, x.shape[1]
        before = 0 if state is None else self.size - 1
        if state is not None:
            x, pos, seg = (torch.cat([old.to(new.dtype), new], 1) for old, new in zip(state, (x, pos, seg)))
        nearest = 1 - self.size if self.causal else -(self.size // 2)
        mixed = x.new_zeros(x.shape[0], length, x.shape[2])
        for tap, away in enumerate(range(nearest, nearest + self.size)):
            # the columns in which the neighbours of tokens `rows` stand
            begin, end = max(0, before + away), min(x.shape[1], before + away + length)
            rows = slice(begin - before - away, end - before - away)
            if begin < end:
                there = (pos[:, begin:end] == own_pos[:, rows] + away) & (seg[:, begin:end] == own_seg[:, rows])
                seen = torch.where(there[..., None], x[:, begin:end], 0.0) * self.depth[tap]
                mixed = mixed + F.pad(seen, (0, 0, rows.start, length - rows.stop))
        return mixed

    def _last(self, x: Tensor, pos: Tensor, seg: Tensor, state: ConvolutionState) -> ConvolutionState:
        """The last real tokens of each row, of the state and of this call, whose padding stands at the end."""
        real = (seg != PADDING_SEGMENT).sum(1, keepdim=True)
        column = real + torch.arange(self.size - 1, device=seg.device)
        x, pos, seg = (torch.cat([old.to(new.dtype), new], 1) for old, new in zip(state, (x, pos, seg)))
        wide = column[..., None].expand(-1, -1, x.shape[2])
        return ConvolutionState(x.gather(1, wide), pos.gather(1, column), seg.gather(1, column))

    def extra_repr(self) -> str:
        return f"size={self.size}, {'causal' if self.causal else 'both sides'}"
