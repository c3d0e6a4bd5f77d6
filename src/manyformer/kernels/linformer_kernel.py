"""Attention of low rank: softmax over a fixed number of mixtures of the keys."""

import math
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.core import PADDING_SEGMENT, ContiguousLayout, LayerOutput, State, TokenPositions, WatchFn, no_watch
from manyformer.kernels.kernel import Kernel
from manyformer.kernels.length_projection import LengthProjection
from manyformer.masks import AllKeys, Mask
from manyformer.ops import softmax_attention as ops
from manyformer.ops.document_grid import DocumentGrid, grid
from manyformer.position import NoPosition, Position


class _Seen(NamedTuple):
    """Slots of keys and values, and which of them each query sees, None being all of them."""

    k: Float[Tensor, "b g k e"]
    v: Float[Tensor, "b g k f"]
    mask: Bool[Tensor, "b 1 l k"] | None


@final
class LinformerKernel(Kernel):
    """softmax(q (E k)^T / sqrt(e)) (F v), E and F mixing along the length (Wang et al. 2020, section 4).

    E is `keys`, F is `values` or the same module again. Each document has slots of its own, by the positions of its
    tokens, so that padding and packing change nothing; tokens of one number in several pieces add up at equal
    positions. Every slot holds something of every token: no mask can be applied, least of all a causal one, nor can
    positions act on pairs or on keys. Raises ValueError for those, and for documents that are too long.
    """

    supports: frozenset[str] = frozenset()

    def __init__(
        self,
        keys: LengthProjection,
        values: LengthProjection | None = None,
        mask: Mask | None = None,
        *,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        if mask is not None and mask != AllKeys():
            why = "each of its slots mixes all tokens, later ones too, so that none can be hidden from a query"
            raise ValueError(f"Linformer cannot apply the mask {mask!r}: {why}; it is for encoders")
        if values is not None and values.slots != keys.slots:
            raise ValueError(f"LinformerKernel: {keys.slots} slots of keys need as many of values, not {values.slots}")
        self.keys, self.values = keys, keys if values is None else values
        self.scale = scale

    def forward(
        self,
        q: Float[Tensor, "b h l e"],
        k: Float[Tensor, "b g s e"],
        v: Float[Tensor, "b g s f"],
        query_positions: TokenPositions,
        key_positions: TokenPositions,
        position: Position,
        state: State = None,
        watch: WatchFn = no_watch,
    ) -> LayerOutput:
        seen = self._mix(k, v, query_positions, key_positions)
        scale = 1 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale
        if watch is no_watch:
            return LayerOutput(ops.fused(q, seen.k, seen.v, seen.mask, causal=False, scale=scale), state)
        every = torch.ones(1, 1, q.shape[2], seen.k.shape[2], dtype=torch.bool, device=q.device)
        mask = every if seen.mask is None else seen.mask
        y, weights = ops.naive(
            q,
            seen.k,
            seen.v,
            mask,
            scale=scale,
            position=NoPosition(),
            query_positions=query_positions,
            key_positions=key_positions,
        )
        watch(self, "weights", weights)
        return LayerOutput(y, state)

    def explain(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        query_positions: TokenPositions,
        key_positions: TokenPositions,
        position: Position,
        state: State = None,
        watch: WatchFn = no_watch,
    ) -> str:
        if watch is not no_watch:
            return f"naive: the weights of {self.keys.slots} slots are watched"
        return f"sdpa: {self.keys.slots} slots in place of {k.shape[2]} keys"

    def _mix(self, k: Tensor, v: Tensor, query_positions: TokenPositions, key_positions: TokenPositions) -> _Seen:
        if isinstance(key_positions.layout, ContiguousLayout):
            self._check(k.shape[2])
            return _Seen(self.keys(k).x, self.values(v).x, None)
        laid, number = _by_number(key_positions)
        self._check(laid.present.shape[1])
        keys, values = self.keys(laid.scatter(k), laid.present), self.values(laid.scatter(v), laid.present)
        k, v = (_in_rows(x.x, k.shape[0]) for x in (keys, values))
        if len(number) == 1 and keys.filled is None:
            return _Seen(k, v, None)
        # a slot belongs to its document
        mask = query_positions.segment_ids[:, :, None] == number.repeat_interleave(keys.x.shape[2])
        if keys.filled is not None:
            mask = mask & keys.filled.reshape(k.shape[0], 1, -1)
        return _Seen(k, v, mask[:, None])

    def _check(self, length: int) -> None:
        max_length = min(self.keys.max_length, self.values.max_length)
        if length > max_length:
            raise ValueError(
                f"{length} tokens are more than this Linformer allows: it was built for longest={max_length}"
            )


def _in_rows(x: Float[Tensor, "bn g k e"], rows: int) -> Float[Tensor, "b g nk e"]:
    """The slots of all documents of a row, one after the other."""
    return x.reshape(rows, -1, *x.shape[1:]).transpose(1, 2).flatten(2, 3)


def _by_number(key_positions: TokenPositions) -> tuple[DocumentGrid, Int[Tensor, " n"]]:
    """A line for each number of a document in each row, and those numbers, the same in every row."""
    real = key_positions.segment_ids != PADDING_SEGMENT
    number = torch.unique(key_positions.segment_ids[real])
    # rows of nothing but padding: one document that has no tokens
    number = number if number.numel() else number.new_zeros(1)
    row = torch.arange(key_positions.segment_ids.shape[0], device=key_positions.segment_ids.device)[:, None]
    line = row * len(number) + torch.searchsorted(number, key_positions.segment_ids.contiguous())
    return grid(line, key_positions.position_ids, real, key_positions.segment_ids.shape[0] * len(number)), number
