"""Segment-level recurrence: cached tokens of earlier segments, or those of a given prefix, precede the layer's own."""

from typing import Literal, NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.nn.attention.kv_cache.kv_source import CacheSpec, KeysValues, KVSource, ProjectKV, require_no_grad
from manyformer.nn.attention.kv_cache.window_cache import SpanReach
from manyformer.nn.core import (
    PADDING_SEGMENT,
    AlignedLayout,
    Context,
    ContiguousLayout,
    PackedLayout,
    State,
    TokenPositions,
)
from manyformer.nn.runtime.training_hooks import StatefulAcrossBatches


class RememberedInputs(NamedTuple):
    """The last inputs of the layer and their positions: for training, where projections change every step."""

    x: Float[Tensor, "b m d"]
    position_ids: Int[Tensor, "b m"]
    segment_ids: Int[Tensor, "b m"]


class RememberedKV(NamedTuple):
    """Keys and values of the last tokens: for decoding and scoring, where projections do not change."""

    k: Float[Tensor, "b g m e"]
    v: Float[Tensor, "b g m f"]
    position_ids: Int[Tensor, "b m"]
    segment_ids: Int[Tensor, "b m"]


class RememberedBuffer(NamedTuple):
    """`RememberedKV` in a buffer that is written in place: the columns `start` to `stop` are in use."""

    k: Float[Tensor, "b g capacity e"]
    v: Float[Tensor, "b g capacity f"]
    position_ids: Int[Tensor, "b capacity"]
    segment_ids: Int[Tensor, "b capacity"]
    start: int = 0
    stop: int = 0


@final
class SegmentMemorySource(KVSource, StatefulAcrossBatches):
    """The layer's input after the `size` tokens that precede it (Dai et al. 2019, arXiv:1901.02860, section 3.2).

    While training the state holds the inputs of the layer, (b, m, dim): they get no gradient, but the projections of
    the current step get one through them. Otherwise it holds keys and values, or with `evaluation_state` "inputs" the
    same as in training, for states from which training continues. The memory is initially empty; tokens of
    another document than the query's are masked by segment id, row by row. In rows with padding the memory holds the
    last `size` valid tokens. A state created with `capacity` is written in place and needs `torch.no_grad()`; it can be
    rolled back by one token only. The kernel's mask decides which of these tokens a query sees. While training, tokens
    beyond the current `reach` of all queries are kept but not projected.
    """

    def __init__(
        self,
        size: int,
        dim: int,
        *,
        evaluation_state: Literal["keys-values", "inputs"] = "keys-values",
        reach: SpanReach | None = None,
    ) -> None:
        super().__init__()
        if size < 1:
            raise ValueError(f"SegmentMemorySource: size ({size}) must be at least 1; for no memory use no source")
        self.size = size
        self.dim = dim
        self.keeps_inputs = evaluation_state == "inputs"
        self.reach = reach

    def init_state(self, spec: CacheSpec) -> State:
        if spec.recurrent:
            raise ValueError(
                "SegmentMemorySource: a recurrent kernel keeps a summary of keys and cannot use a memory of tokens"
            )
        begins_with_inputs = self.training or (spec.capacity is None and self.keeps_inputs)
        if begins_with_inputs or spec.capacity is None:
            columns = 0
        else:
            # twice the memory, so that it is copied to the front only once every `size` tokens
            columns = min(spec.capacity, 2 * self.size)
        position_ids = torch.zeros(spec.batch, columns, dtype=torch.long, device=spec.device)
        if begins_with_inputs:
            inputs = torch.zeros(spec.batch, 0, self.dim, device=spec.device, dtype=spec.dtype)
            return RememberedInputs(inputs, position_ids, position_ids)
        if spec.capacity is None:
            return RememberedKV(*spec.zeros(0), position_ids, position_ids)
        return RememberedBuffer(*spec.zeros(columns), position_ids, torch.full_like(position_ids, PADDING_SEGMENT))

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, project: ProjectKV, state: State) -> KeysValues:
        if state is None:
            return KeysValues(*project(x, ctx.positions), ctx.positions)
        if isinstance(state, RememberedInputs):
            return self._project_remembered(state, x, ctx.positions, project)
        k, v = project(x, ctx.positions)
        if isinstance(state, RememberedBuffer):
            return self._write_in_place(state, k, v, ctx.positions)
        # a state may be of another precision than a call under autocast
        k, v = (torch.cat([old.to(new.dtype), new], 2) for old, new in ((state.k, k), (state.v, v)))
        positions = join_positions(state.position_ids, state.segment_ids, ctx.positions)
        return KeysValues(k, v, positions, self._last_keys_values(k.detach(), v.detach(), positions))

    def _last_keys_values(self, k: Tensor, v: Tensor, positions: TokenPositions) -> RememberedKV:
        # transposed, because `last_tokens` expects the token axis second
        (k, v), position_ids, segment_ids = last_tokens([k.transpose(1, 2), v.transpose(1, 2)], positions, self.size)
        return RememberedKV(k.transpose(1, 2), v.transpose(1, 2), position_ids, segment_ids)

    def _project_remembered(
        self, state: RememberedInputs, x: Tensor, positions: TokenPositions, project: ProjectKV
    ) -> KeysValues:
        """Project the remembered inputs with the current weights."""
        all_positions = join_positions(state.position_ids, state.segment_ids, positions)
        size = state.position_ids.shape[1]
        # without padding, this many new tokens replace the whole memory
        fills_memory = x.shape[1] >= self.size and isinstance(all_positions.layout, ContiguousLayout | AlignedLayout)
        if fills_memory:
            tokens = x.detach()
        else:
            tokens = torch.cat([state.x.to(x.dtype), x.detach()], 1)
        (inputs,), position_ids, segment_ids = last_tokens([tokens], all_positions, self.size)
        k, v = project(x, positions)
        hidden = 0
        if self.reach is not None:
            # tokens that no head can see with its present span are kept, for spans that grow, and not projected
            hidden = max(0, size - self.reach.max_reach())
        if hidden:
            all_positions = all_positions.columns(hidden, size + x.shape[1])
        if size > hidden:
            # projected separately, so that no gradient of the remembered inputs is computed
            old = project(state.x[:, hidden:].detach().to(x.dtype), all_positions.columns(0, size - hidden))
            k = _concatenate_heads_first(old[0], k)
            v = _concatenate_heads_first(old[1], v)
        return KeysValues(k, v, all_positions, RememberedInputs(inputs, position_ids, segment_ids))

    def _write_in_place(self, buffer: RememberedBuffer, k: Tensor, v: Tensor, positions: TokenPositions) -> KeysValues:
        require_no_grad()
        count = k.shape[2]
        start = buffer.stop
        if start + count > buffer.position_ids.shape[1]:
            buffer = self._reallocate(buffer, count)
            start = buffer.stop
        stop = start + count
        buffer.k.narrow(2, start, count).copy_(k)
        buffer.v.narrow(2, start, count).copy_(v)
        buffer.position_ids.narrow(1, start, count).copy_(positions.position_ids)
        buffer.segment_ids.narrow(1, start, count).copy_(positions.segment_ids)
        # older tokens than the memory holds stay visible to the first tokens of this call
        used = buffer.start, stop - buffer.start
        k = buffer.k.narrow(2, *used)
        v = buffer.v.narrow(2, *used)
        position_ids = buffer.position_ids.narrow(1, *used)
        segment_ids = buffer.segment_ids.narrow(1, *used)
        all_positions = TokenPositions(position_ids, segment_ids, _joined_layout(positions, start - buffer.start))
        if not isinstance(all_positions.layout, ContiguousLayout | AlignedLayout):
            # padding columns do not count towards the memory
            last = self._last_keys_values(k, v, all_positions)
            buffer = RememberedBuffer(*last, 0, last.position_ids.shape[1])
            return KeysValues(k, v, all_positions, self._reallocate(buffer, count))
        return KeysValues(k, v, all_positions, buffer._replace(start=max(buffer.start, stop - self.size), stop=stop))

    def _reallocate(self, buffer: RememberedBuffer, count: int) -> RememberedBuffer:
        """Copy the used columns to a new buffer with capacity for `count`, or `size`, more tokens."""
        length = buffer.stop - buffer.start
        fields = []
        for field, axis in zip(buffer[:4], (2, 2, 1, 1)):
            shape = list(field.shape)
            shape[axis] = self.size + max(count, self.size)
            fields.append(field.new_zeros(shape))
            fields[-1].narrow(axis, 0, length).copy_(field.narrow(axis, buffer.start, length))
        k, v, position_ids, segment_ids = fields
        return RememberedBuffer(k, v, position_ids, segment_ids, 0, length)

    def extra_repr(self) -> str:
        return f"size={self.size}"


def _concatenate_heads_first(old: Float[Tensor, "b g m e"], new: Float[Tensor, "b g l e"]) -> Float[Tensor, "b g s e"]:
    """Concatenate along tokens, with the head axis outermost in memory, as distance-based scores need it."""
    return torch.cat([old.transpose(0, 1), new.transpose(0, 1)], 2).transpose(0, 1)


def join_positions(
    position_ids: Int[Tensor, "b m"], segment_ids: Int[Tensor, "b m"], positions: TokenPositions
) -> TokenPositions:
    """Join the positions of remembered tokens and of this call."""
    if not position_ids.shape[1]:
        return positions
    if any(field is not None for field in (positions.roles, positions.tree)):
        raise ValueError("the segment memory does not store roles or trees of tokens; call without a state")
    rows = position_ids.shape[0]
    layout = _joined_layout(positions, position_ids.shape[1])
    position_ids, segment_ids = (
        torch.cat([old, new.expand(rows, -1)], 1) for old, new in zip((position_ids, segment_ids), positions[:2])
    )
    return TokenPositions(position_ids, segment_ids, layout)


def _joined_layout(
    positions: TokenPositions, num_columns: int
) -> ContiguousLayout | AlignedLayout | PackedLayout | None:
    """The layout of `num_columns` earlier columns of the same stream followed by `positions`."""
    layout = positions.layout
    if isinstance(layout, ContiguousLayout | AlignedLayout):
        # the first column is now that of the oldest remembered token
        return type(layout)(layout.start - num_columns)
    # packed layouts start at the first column of a stream
    if not num_columns and isinstance(layout, PackedLayout):
        return layout
    return None


def last_tokens(
    parts: list[Float[Tensor, "b s ..."]], positions: TokenPositions, size: int
) -> tuple[list[Float[Tensor, "b m ..."]], Int[Tensor, "b m"], Int[Tensor, "b m"]]:
    """Select the last `size` tokens of each row, without padding where the layout may have some."""
    position_ids, segment_ids = (ids.expand(parts[0].shape[0], -1) for ids in positions[:2])
    if not isinstance(positions.layout, ContiguousLayout | AlignedLayout):
        # a stable sort of two kinds: padding first, and the last columns are the last tokens
        order = (segment_ids != PADDING_SEGMENT).byte().argsort(dim=1, stable=True)[:, -size:]
        rows = torch.arange(len(order), device=order.device)[:, None]
        return [part[rows, order] for part in parts], position_ids[rows, order], segment_ids[rows, order]
    return [part[:, -size:] for part in parts], position_ids[:, -size:], segment_ids[:, -size:]


@final
class PrefixSource(KVSource):
    """The tokens of `ctx.memory`, if any, followed by the layer's input; the caller keeps the prefix."""

    needs_heads = True

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, project: ProjectKV, state: State) -> KeysValues:
        if ctx.memory is None or not ctx.memory.y.shape[1]:
            return KeysValues(*project(x, ctx.positions), ctx.positions, state)
        y, prefix = ctx.memory
        positions = join_positions(prefix.position_ids, prefix.segment_ids, ctx.positions)
        return KeysValues(*project(torch.cat([y.to(x.dtype), x], 1), positions), positions, state)
