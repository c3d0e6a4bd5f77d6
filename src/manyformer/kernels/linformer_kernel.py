"""Low-rank attention: softmax over a fixed number of projections of the keys along the length."""

import math
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.core import PADDING_SEGMENT, ContiguousLayout, LayerOutput, PackedLayout, TokenPositions, no_watch
from manyformer.kernels.kernel import Kernel, KernelCall
from manyformer.kernels.length_projection import LengthProjection
from manyformer.masks import AllKeys, Mask
from manyformer.ops import softmax_attention as ops
from manyformer.ops.document_rows import DocumentGrid, make_grid
from manyformer.position import NoPosition
from manyformer.system.devices import send


class _ProjectedKV(NamedTuple):
    """Projected slots of keys and values, and which of them each query sees; None means all."""

    k: Float[Tensor, "b g k e"]
    v: Float[Tensor, "b g k f"]
    mask: Bool[Tensor, "b 1 l k"] | None


@final
class LinformerKernel(Kernel):
    """softmax(q (E k)^T / sqrt(e)) (F v), E and F being projections along the length (Wang et al. 2020, section 4).

    E is `keys`; F is `values`, or the same module. Each document is projected separately, by the positions of its
    tokens, so that padding and packing do not change outputs; tokens of equal segment id and position are added. Every
    slot mixes all tokens, so no mask can be applied, in particular no causal one, and positions can act neither on
    pairs nor on keys. Raises ValueError for these and for documents that are too long.
    """

    supports: frozenset[str] = frozenset()
    mixes_keys = True

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
            reason = "each slot mixes all tokens of a document, so none can be masked for a query"
            raise ValueError(f"LinformerKernel cannot apply the mask {mask!r}: {reason}; it is for encoders")
        if values is not None and values.slots != keys.slots:
            raise ValueError(
                f"LinformerKernel: keys have {keys.slots} slots, so values need as many, not {values.slots}"
            )
        self.keys = keys
        self.values = keys if values is None else values
        self.scale = scale

    def forward(self, call: KernelCall) -> LayerOutput:
        k, v, mask = self._project(call)
        q = call.q
        if self.scale is None:
            scale = 1 / math.sqrt(q.shape[-1])
        else:
            scale = self.scale
        if call.watch is no_watch:
            return LayerOutput(ops.fused_attention(q, k, v, mask, causal=False, scale=scale), call.state)
        if mask is None:
            mask = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        y, weights = call._replace(k=k, v=v, position=NoPosition()).softmax_reference(mask, scale=scale)
        call.watch(self, "weights", weights)
        return LayerOutput(y, call.state)

    def explain(self, call: KernelCall) -> str:
        if call.watch is not no_watch:
            return f"naive: the weights of {self.keys.slots} slots are watched"
        return f"sdpa: {self.keys.slots} slots in place of {call.k.shape[2]} keys"

    def _project(self, call: KernelCall) -> _ProjectedKV:
        k = call.k
        v = call.v
        key_positions = call.key_positions
        if isinstance(key_positions.layout, ContiguousLayout):
            self._check_length(k.shape[2])
            return _ProjectedKV(self.keys(k).x, self.values(v).x, None)
        documents, segment_ids = _group_by_segment(key_positions)
        self._check_length(documents.present.shape[1])
        keys = self.keys(documents.scatter(k), documents.present)
        values = self.values(documents.scatter(v), documents.present)
        k, v = (_join_slots(x.x, k.shape[0]) for x in (keys, values))
        if len(segment_ids) == 1 and keys.filled is None:
            return _ProjectedKV(k, v, None)
        # a slot belongs to its document
        mask = call.query_positions.segment_ids[:, :, None] == segment_ids.repeat_interleave(keys.x.shape[2])
        if keys.filled is not None:
            mask = mask & keys.filled.reshape(k.shape[0], 1, -1)
        return _ProjectedKV(k, v, mask[:, None])

    def _check_length(self, length: int) -> None:
        max_length = min(self.keys.max_length, self.values.max_length)
        if length > max_length:
            raise ValueError(
                f"LinformerKernel was built for max_length={max_length}, got a document of {length} tokens"
            )


def _join_slots(x: Float[Tensor, "bn g k e"], rows: int) -> Float[Tensor, "b g nk e"]:
    """Concatenate the slots of all documents of each row."""
    return x.reshape(rows, -1, *x.shape[1:]).transpose(1, 2).flatten(2, 3)


def _group_by_segment(key_positions: TokenPositions) -> tuple[DocumentGrid, Int[Tensor, " n"]]:
    """A grid with one line for each row and segment id, and these segment ids, the same for every row."""
    segment_ids = key_positions.segment_ids
    layout = key_positions.layout
    valid = segment_ids != PADDING_SEGMENT
    if isinstance(layout, PackedLayout) and layout.distinct_ids is not None:
        segments = send(torch.tensor(layout.distinct_ids, dtype=torch.long, device="cpu"), segment_ids.device)
        longest = max(layout.longest, 1)
    else:
        segments = torch.unique(segment_ids[valid])
        longest = None
    # if all tokens are padding: one document without tokens
    if segments.numel():
        segments = segments
    else:
        segments = segments.new_zeros(1)
    batch = len(segment_ids)
    row = torch.arange(batch, device=segments.device)[:, None]
    grid_rows = row * len(segments) + torch.searchsorted(segments, segment_ids.contiguous())
    return make_grid(grid_rows, key_positions.position_ids, valid, batch * len(segments), longest), segments
