"""Attention of low rank: softmax over a fixed number of mixtures of the keys."""

import math
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.core import PADDING, Out, Place, Plain, State, Watch, ignore
from manyformer.kernels.base import Kernel
from manyformer.kernels.lengthwise import Lengthwise
from manyformer.masks import Everything, Mask
from manyformer.ops import softmax as ops
from manyformer.ops.grid import Grid, grid
from manyformer.position import NoPosition, Position


class _Seen(NamedTuple):
    """Slots of keys and values, and which of them each query sees, None being all of them."""

    k: Float[Tensor, "b g k e"]
    v: Float[Tensor, "b g k f"]
    mask: Bool[Tensor, "b 1 l k"] | None


@final
class Linformer(Kernel):
    """softmax(q (E k)^T / sqrt(e)) (F v), E and F mixing along the length (Wang et al. 2020, section 4).

    E is `keys`, F is `values` or the same module again. Each document has slots of its own, by the positions of its
    tokens, so that padding and packing change nothing; tokens of one number in several pieces add up at equal
    positions. Every slot holds something of every token: no mask can be applied, least of all a causal one, nor can
    positions act on pairs or on keys. Raises ValueError for those, and for documents that are too long.
    """

    honours: frozenset[str] = frozenset()

    def __init__(
        self,
        keys: Lengthwise,
        values: Lengthwise | None = None,
        mask: Mask | None = None,
        *,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        if mask is not None and mask != Everything():
            why = "each of its slots mixes all tokens, later ones too, so that none can be hidden from a query"
            raise ValueError(f"Linformer cannot apply the mask {mask!r}: {why}; it is for encoders")
        if values is not None and values.slots != keys.slots:
            raise ValueError(f"Linformer: {keys.slots} slots of keys need as many of values, not {values.slots}")
        self.keys, self.values = keys, keys if values is None else values
        self.scale = scale

    def forward(
        self,
        q: Float[Tensor, "b h l e"],
        k: Float[Tensor, "b g s e"],
        v: Float[Tensor, "b g s f"],
        at: Place,
        of: Place,
        position: Position,
        state: State = None,
        watch: Watch = ignore,
    ) -> Out:
        seen = self._mix(k, v, at, of)
        scale = 1 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale
        if watch is ignore:
            return Out(ops.fused(q, seen.k, seen.v, seen.mask, causal=False, scale=scale), state)
        every = torch.ones(1, 1, q.shape[2], seen.k.shape[2], dtype=torch.bool, device=q.device)
        mask = every if seen.mask is None else seen.mask
        y, weights = ops.naive(q, seen.k, seen.v, mask, scale=scale, position=NoPosition(), at=at, of=of)
        watch(self, "weights", weights)
        return Out(y, state)

    def explain(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        at: Place,
        of: Place,
        position: Position,
        state: State = None,
        watch: Watch = ignore,
    ) -> str:
        if watch is not ignore:
            return f"naive: the weights of {self.keys.slots} slots are watched"
        return f"sdpa: {self.keys.slots} slots in place of {k.shape[2]} keys"

    def _mix(self, k: Tensor, v: Tensor, at: Place, of: Place) -> _Seen:
        if isinstance(of.layout, Plain):
            self._check(k.shape[2])
            return _Seen(self.keys(k).x, self.values(v).x, None)
        laid, number = _by_number(of)
        self._check(laid.present.shape[1])
        keys, values = self.keys(laid.lay(k), laid.present), self.values(laid.lay(v), laid.present)
        k, v = (_in_rows(x.x, k.shape[0]) for x in (keys, values))
        if len(number) == 1 and keys.filled is None:
            return _Seen(k, v, None)
        # a slot belongs to its document
        mask = at.seg[:, :, None] == number.repeat_interleave(keys.x.shape[2])
        if keys.filled is not None:
            mask = mask & keys.filled.reshape(k.shape[0], 1, -1)
        return _Seen(k, v, mask[:, None])

    def _check(self, length: int) -> None:
        longest = min(self.keys.longest, self.values.longest)
        if length > longest:
            raise ValueError(f"{length} tokens are more than this Linformer allows: it was built for longest={longest}")


def _in_rows(x: Float[Tensor, "bn g k e"], rows: int) -> Float[Tensor, "b g nk e"]:
    """The slots of all documents of a row, one after the other."""
    return x.reshape(rows, -1, *x.shape[1:]).transpose(1, 2).flatten(2, 3)


def _by_number(of: Place) -> tuple[Grid, Int[Tensor, " n"]]:
    """A line for each number of a document in each row, and those numbers, the same in every row."""
    real = of.seg != PADDING
    number = torch.unique(of.seg[real])
    # rows of nothing but padding: one document that has no tokens
    number = number if number.numel() else number.new_zeros(1)
    row = torch.arange(of.seg.shape[0], device=of.seg.device)[:, None]
    line = row * len(number) + torch.searchsorted(number, of.seg.contiguous())
    return grid(line, of.pos, real, of.seg.shape[0] * len(number)), number
