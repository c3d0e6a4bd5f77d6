"""Infini-attention: softmax inside a segment, and a compressive memory of all segments before it."""

import math
from typing import Literal, NamedTuple, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from manyformer.nn.core import ContiguousLayout, LayerOutput, contiguous_positions, tree_map
from manyformer.nn.kernels.kernel import Kernel, KernelCall
from manyformer.nn.linear.deterministic import elu_plus_one
from manyformer.nn.ops.any_length import scan_any_length
from manyformer.nn.ops.document_rows import SegmentRows, segment_rows
from manyformer.nn.ops.softmax_attention import fused_attention
from manyformer.nn.positions.position import NoPosition, Position
from manyformer.nn.runtime.head_selection import PerHeadTensors
from manyformer.nn.runtime.torch_internals import autocast_disabled, is_of_any_size

InfiniUpdate = Literal["sum", "delta"]


class SegmentMemory(NamedTuple):
    """The memory of complete segments: sums of products of key features and values, and of key features."""

    matrix: Float[Tensor, "n g e f"]
    normalizer: Float[Tensor, "n g e"]

    def read(self, features: Float[Tensor, "n g l e"]) -> Float[Tensor, "n g l f"]:
        """What it returns for these queries or keys; zeros while it is empty."""
        total = features @ self.normalizer[..., None]
        return features @ self.matrix / (total + (total == 0))

    def of_heads(self, group: int) -> "SegmentMemory":
        """The memory of each query head, where `group` of them share a key head."""
        return SegmentMemory(*(x.repeat_interleave(group, 1) for x in self))


class InfiniState(NamedTuple):
    """The memory of each row, and the keys and values of its incomplete segment, in the columns of their positions."""

    memory: SegmentMemory
    k: Float[Tensor, "b g n e"]
    v: Float[Tensor, "b g n f"]


@final
class InfiniKernel(Kernel, PerHeadTensors):
    """s A_memory + (1 - s) A_segment, s = sigmoid(beta) of each head (Munkhdalai et al. 2024, arXiv:2404.07143).

    Section 2.1. A query attends causally to its own segment of `segment` tokens, and reads the memory of all earlier
    segments by linear attention with features elu + 1; a complete segment is added to it, by `update` "sum" as it is,
    by "delta" after subtracting what the memory returns for its keys. `position` acts inside segments alone, and the
    memory has none. Segments are counted from a document's first token; before the second one the memory returns zeros.
    A state has a memory of float32 at least and at most one segment of tokens. Raises ValueError for an empty segment,
    an unknown update and a position that does not act on queries and keys alone.
    """

    supports = frozenset()
    recurrent = True
    head_axes = (("beta", -1),)

    def __init__(
        self, heads: int, segment: int, *, update: InfiniUpdate = "delta", position: Position | None = None
    ) -> None:
        super().__init__()
        if segment < 1:
            raise ValueError(f"InfiniKernel: segment ({segment}) must be at least 1 token")
        if update not in ("sum", "delta"):
            raise ValueError(f"InfiniKernel: update ('{update}') must be sum or delta")
        self.position = NoPosition() if position is None else position
        if unsupported := self.position.required_seams() - {"query", "key"}:
            raise ValueError(f"InfiniKernel does not support {sorted(unsupported)}, which {self.position} needs")
        self.segment = segment
        self.update = update
        self.beta = nn.Parameter(torch.zeros(heads))

    def forward(self, call: KernelCall) -> LayerOutput:
        length = call.q.shape[2]
        layout = call.query_positions.layout
        # one token in the same place of every row: the general form below would move whole segments for it
        if call.state and length == 1 and isinstance(layout, ContiguousLayout):
            return self._attend_one(call, layout.start % self.segment)
        rows = segment_rows(call.key_positions, call.q.shape[0], length, self.segment)
        state = call.state or self._empty_state(call)
        if not call.state:
            rows = rows._replace(continues=torch.zeros_like(rows.continues))
        if call.state is None:
            rows = rows.shortened(length, self.segment)
        q, k, v = (rows.scatter(x) for x in (call.q, call.k, call.v))
        if call.state:
            # tokens of the incomplete segment were left in the state, in the columns that they have now
            is_earlier = (torch.arange(self.segment, device=q.device) < rows.first[:, None]) & rows.continues[:, None]
            earlier = (x[rows.row].to(q.dtype) * is_earlier[:, None, :, None] for x in state[1:])
            k, v = (x + F.pad(part, (0, 0, 0, rows.columns - self.segment)) for x, part in zip((k, v), earlier))
        present = rows.present
        is_plain = call.key_positions.layout == ContiguousLayout()
        local_y = self._attend_to_segments(q, k, v, None if is_plain else present)
        initial = SegmentMemory(*(_masked(part[rows.row], rows.continues) for part in state.memory))
        read = self._read_memory_of_any_length if is_of_any_size(rows.columns) else self._read_memory
        with autocast_disabled(q.device):
            memory_y, memory = read(q, k, v, present, initial)
        share = self.beta.sigmoid()[:, None, None]
        y = rows.gather(share * memory_y.to(local_y.dtype) + (1 - share) * local_y, length)
        return LayerOutput(y.to(v.dtype), None if call.state is None else self._next_state(rows, memory, k, v, state))

    def explain(self, call: KernelCall) -> str:
        return f"segments of {self.segment} tokens, and one product with the memory of each"

    def extra_repr(self) -> str:
        return f"segment={self.segment}, update={self.update}"

    def _empty_state(self, call: KernelCall) -> InfiniState:
        batch, groups, _, width = call.k.shape
        value_width = call.v.shape[-1]
        wide_dtype = torch.promote_types(call.v.dtype, torch.float32)
        matrix = torch.zeros(batch, groups, width, value_width, device=call.v.device, dtype=wide_dtype)
        k, v = (call.v.new_zeros(batch, groups, self.segment, size) for size in (width, value_width))
        return InfiniState(SegmentMemory(matrix, matrix[..., 0]), k, v)

    def _attend_one(self, call: KernelCall, column: int) -> LayerOutput:
        """Attention of the next token of each row, in this column of its segment: nothing has to be moved or masked."""
        q = call.q
        k = call.k
        v = call.v
        (memory, *earlier) = call.state
        k, v = (torch.cat([cached[:, :, :column].to(new.dtype), new], 2) for cached, new in zip(earlier, (k, v)))
        turned_q = self.position.query(q, contiguous_positions(q.shape[0], column, column + 1, q.device))
        turned_k = self.position.key(k, contiguous_positions(k.shape[0], 0, column + 1, k.device))
        local_y = fused_attention(turned_q, turned_k, v, None, causal=False, scale=1 / math.sqrt(q.shape[-1]))
        dtype = memory.matrix.dtype
        with autocast_disabled(q.device):
            memory_y = memory.of_heads(q.shape[1] // k.shape[1]).read(elu_plus_one(q.to(dtype)))
            if column == self.segment - 1:
                memory = self._add_segment(memory, elu_plus_one(k.to(dtype)), v.to(dtype))
        k, v = (F.pad(x, (0, 0, 0, self.segment - column - 1)) for x in (k, v))
        share = self.beta.sigmoid()[:, None, None]
        y = share * memory_y.to(local_y.dtype) + (1 - share) * local_y
        return LayerOutput(y.to(v.dtype), InfiniState(memory, k, v))

    def _attend_to_segments(
        self,
        q: Float[Tensor, "n h p e"],
        k: Float[Tensor, "n g p e"],
        v: Float[Tensor, "n g p f"],
        present: Bool[Tensor, "n p"] | None,
    ) -> Float[Tensor, "n h p f"]:
        """Causal softmax attention inside each segment; without `present` only the last columns may be empty."""
        # inside a segment only distances count, so that positions may begin anywhere
        positions = contiguous_positions(q.shape[0], 0, q.shape[2], q.device)
        q = self.position.query(q, positions)
        k = self.position.key(k, positions)
        segment = self.segment if is_of_any_size(q.shape[2]) else min(self.segment, q.shape[2])
        q, k, v = (x.unflatten(2, (-1, segment)).transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # type: ignore[no-untyped-call]
        mask = None
        if present is not None:
            causal = torch.ones(segment, segment, dtype=torch.bool, device=q.device).tril()
            # empty columns see themselves, because a row that sees nothing has no softmax
            diagonal = torch.eye(segment, dtype=torch.bool, device=q.device)
            mask = (causal & present.view(-1, 1, 1, segment)) | diagonal
        y = fused_attention(q, k, v, mask, causal=mask is None, scale=1 / math.sqrt(q.shape[-1]))
        by_row = y.unflatten(0, (positions.position_ids.shape[0], -1))  # type: ignore[no-untyped-call]
        joined: Tensor = by_row.transpose(1, 2).flatten(2, 3)
        return joined

    def _read_memory(
        self, q: Tensor, k: Tensor, v: Tensor, present: Bool[Tensor, "n p"], memory: SegmentMemory
    ) -> tuple[Float[Tensor, "n h p f"], SegmentMemory]:
        """What the memory of the segments before a query returns, and the memory after all complete segments."""
        dtype = memory.matrix.dtype
        group = q.shape[1] // k.shape[1]
        query_features = elu_plus_one(q.to(dtype))
        key_features = elu_plus_one(k.to(dtype)) * present[:, None, :, None]
        parts = (torch.split(x, self.segment, 2) for x in (query_features, key_features, v.to(dtype)))
        outputs = []
        for features, keys, values, is_present in zip(*parts, torch.split(present, self.segment, 1), strict=True):
            outputs.append(memory.of_heads(group).read(features))
            # a segment is complete with its last token
            is_complete = is_present[:, -1]
            # rows reach the ends of segments at different times: all are extended, and those keep it that are complete
            longer = self._add_segment(memory, keys, values)
            memory = SegmentMemory(*(_select(is_complete, new, old) for new, old in zip(longer, memory)))
        return torch.cat(outputs, 2), memory

    def _read_memory_of_any_length(
        self, q: Tensor, k: Tensor, v: Tensor, present: Bool[Tensor, "n p"], memory: SegmentMemory
    ) -> tuple[Float[Tensor, "n h p f"], SegmentMemory]:
        """`_read_memory` without a loop over segments, of which an exported graph has one number."""
        dtype = memory.matrix.dtype
        count = q.shape[2] // self.segment
        query_features, key_features, values = (
            x.unflatten(2, (count, self.segment))  # type: ignore[no-untyped-call]
            for x in (elu_plus_one(q.to(dtype)), elu_plus_one(k.to(dtype)), v.to(dtype))
        )
        # a segment that is incomplete, the last of its row, writes nothing
        is_complete = present.unflatten(1, (count, self.segment))[..., -1]  # type: ignore[no-untyped-call]
        key_features = key_features * is_complete[:, None, :, None, None]
        # what is before the first segment counts as a segment of its own
        normalizers = _with_initial(memory.normalizer, key_features.sum(3)).cumsum(2)
        written = _with_initial(memory.matrix, key_features.mT @ values)
        if self.update == "delta":
            # M + K'(V - D K M), with the divisors D of what the memory returns, is an affine function of M
            total = key_features @ normalizers[:, :, :-1, :, None]
            identity = torch.eye(k.shape[3], dtype=dtype, device=k.device)
            kept = identity - key_features.mT @ (key_features / (total + (total == 0)))
            kept = _with_initial(identity.expand(*kept.shape[:2], -1, -1), kept)
            matrices, _ = scan_any_length(_later_segments, (written, kept), (0.0, 0.0), 2)
        else:
            matrices = written.cumsum(2)
        before = SegmentMemory(matrices[:, :, :-1], normalizers[:, :, :-1]).of_heads(q.shape[1] // k.shape[1])
        after = SegmentMemory(matrices[:, :, -1], normalizers[:, :, -1])
        return before.read(query_features).flatten(2, 3), after

    def _add_segment(
        self, memory: SegmentMemory, keys: Float[Tensor, "n g p e"], values: Float[Tensor, "n g p f"]
    ) -> SegmentMemory:
        """The memory after a segment with these features of keys."""
        if self.update == "delta":
            # what the memory returns already is not added again
            written = values - memory.read(keys)
        else:
            written = values
        return SegmentMemory(memory.matrix + keys.mT @ written, memory.normalizer + keys.sum(2))

    def _next_state(
        self, rows: SegmentRows, memory: SegmentMemory, k: Tensor, v: Tensor, state: InfiniState
    ) -> InfiniState:
        """The state of each row after its latest document; that before the call where the call has none."""
        latest = rows.latest.clamp(min=0)
        # the segment of the last token: earlier ones are in the memory, and it alone is kept
        last = ((rows.first + rows.token_count - 1).clamp(min=0) // self.segment)[latest]
        batch_rows = torch.arange(latest.shape[0], device=latest.device)
        k, v = (x[latest].unflatten(2, (-1, self.segment)).transpose(1, 2)[batch_rows, last] for x in (k, v))  # type: ignore[no-untyped-call]
        new = InfiniState(SegmentMemory(*(x[latest] for x in memory)), k, v)
        merged: InfiniState = tree_map(lambda x, y: _select(rows.latest >= 0, x, y.to(x.dtype)), new, state)
        return merged


def _masked(x: Tensor, valid: Bool[Tensor, " n"]) -> Tensor:
    return x.masked_fill(~valid.view(-1, *[1] * (x.ndim - 1)), 0.0)


def _select(condition: Bool[Tensor, " b"], x: Tensor, y: Tensor) -> Tensor:
    return torch.where(condition.view(-1, *[1] * (x.ndim - 1)), x, y)


def _with_initial(initial: Float[Tensor, "n g *e"], segments: Float[Tensor, "n g c *e"]) -> Float[Tensor, "n g d *e"]:
    """What is before the first segment, and what each one adds."""
    return torch.cat([initial[:, :, None], segments], 2)


def _later_segments(earlier: tuple[Tensor, ...], later: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What two parts of a text write to the memory, and the matrices that they multiply it with, together."""
    return later[0] + later[1] @ earlier[0], later[1] @ earlier[1]
