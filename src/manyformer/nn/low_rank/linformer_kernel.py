"""Low-rank attention: softmax over a fixed number of projections of the keys along the length.

Projections from tokens to slots are learned, pooled or convolved (Wang et al. 2020, arXiv:2006.04768, section 4).
"""

import math
from abc import ABC, abstractmethod
from typing import Any, Literal, NamedTuple, final

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from manyformer.nn.core import PADDING_SEGMENT, ContiguousLayout, LayerOutput, PackedLayout, TokenPositions, no_watch
from manyformer.nn.kernels.kernel import Kernel, KernelCall
from manyformer.nn.masks.mask import AllKeys, Mask
from manyformer.nn.ops import softmax_attention as ops
from manyformer.nn.ops.document_rows import DocumentGrid, make_grid
from manyformer.nn.positions.position import NoPosition
from manyformer.nn.runtime.devices import send
from manyformer.nn.runtime.head_selection import PerHeadTensors


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
        # positions that a short document lacks have no weight in its slots
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
            # zeros of absent tokens would win over negative numbers
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
        # (heads, tokens of a window, channels): each channel has weights of its own
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
        # documents that share a row must not share slots
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
    if not segments.numel():
        segments = segments.new_zeros(1)
    batch = len(segment_ids)
    row = torch.arange(batch, device=segments.device)[:, None]
    # segment ids are sorted and the same for all rows, so that queries of another sequence find their document
    grid_rows = row * len(segments) + torch.searchsorted(segments, segment_ids.contiguous())
    return make_grid(grid_rows, key_positions.position_ids, valid, batch * len(segments), longest), segments
