"""Segment recurrence: what a layer was given before stands in front of what it is given now."""

from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.core import (
    PADDING_SEGMENT,
    AlignedLayout,
    Context,
    ContiguousLayout,
    PackedLayout,
    State,
    TokenPositions,
)
from manyformer.sources.kv_source import KeysValues, KVShape, KVSource, ProjectKV
from manyformer.training_hooks import StatefulAcrossBatches


class RememberedInputs(NamedTuple):
    """What the layer was given lately, and where: for training, whose projections change from step to step."""

    x: Float[Tensor, "b m d"]
    pos: Int[Tensor, "b m"]
    seg: Int[Tensor, "b m"]


class RememberedKV(NamedTuple):
    """Keys and values of the same tokens: for writing and scoring, whose projections stay as they are."""

    k: Float[Tensor, "b g m e"]
    v: Float[Tensor, "b g m f"]
    pos: Int[Tensor, "b m"]
    seg: Int[Tensor, "b m"]


class RememberedBuffer(NamedTuple):
    """`RememberedKV` in a buffer that is written in place: the columns from `begin` to before `end` are in use."""

    k: Float[Tensor, "b g room e"]
    v: Float[Tensor, "b g room f"]
    pos: Int[Tensor, "b room"]
    seg: Int[Tensor, "b room"]
    begin: int = 0
    end: int = 0


@final
class SegmentMemorySource(KVSource, StatefulAcrossBatches):
    """The stream's own tokens after the last `size` ones before them (Dai et al. 2019, arXiv:1901.02860, section 3.2).

    While training the state holds the inputs of the layer, (b, m, dim): they get no gradient, but the projections of
    the present step do through them. Otherwise it holds keys and values. A memory begins empty, and what belongs to
    another document than the query is hidden by its number, row by row; in rows with padding the memory holds the last
    `size` real tokens. A state that was started with `capacity` is written in place and needs `torch.no_grad()`; it can
    be gone back to by one token only. What a token sees of all this is up to the kernel's mask.
    """

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        if size < 1:
            raise ValueError(
                f"SegmentMemorySource: size ({size}) must be at least 1; a layer without a memory needs no source"
            )
        self.size, self.dim = size, dim

    def init_state(
        self, batch: int, shape: KVShape, *, folds: bool, capacity: int | None, device: torch.device, dtype: torch.dtype
    ) -> State:
        if folds:
            raise ValueError(
                "SegmentMemorySource: a kernel that folds keys into a summary has no use for a memory of tokens"
            )
        pos = torch.zeros(batch, 0, dtype=torch.long, device=device)
        if self.training:
            return RememberedInputs(torch.zeros(batch, 0, self.dim, device=device, dtype=dtype), pos, pos)
        # twice the memory: it is moved to the front once for as many tokens as it holds
        room = 0 if capacity is None else min(capacity, 2 * self.size)
        k = torch.zeros(batch, shape.kv_heads, room, shape.key, device=device, dtype=dtype)
        v = torch.zeros(batch, shape.kv_heads, room, shape.value, device=device, dtype=dtype)
        if capacity is None:
            return RememberedKV(k, v, pos, pos)
        pos = torch.zeros(batch, room, dtype=torch.long, device=device)
        return RememberedBuffer(k, v, pos, torch.full_like(pos, PADDING_SEGMENT))

    def forward(
        self, x: Float[Tensor, "b l d"], ctx: Context, project: ProjectKV, state: State, *, folds: bool
    ) -> KeysValues:
        if state is None:
            return KeysValues(*project(x, ctx.positions), ctx.positions)
        if isinstance(state, RememberedInputs):
            return self._again(state, x, ctx.positions, project)
        k, v = project(x, ctx.positions)
        if isinstance(state, RememberedBuffer):
            return self._write(state, k, v, ctx.positions)
        k, v = (torch.cat([old.to(new.dtype), new], 2) for old, new in ((state.k, k), (state.v, v)))
        place = join_positions(state.pos, state.seg, ctx.positions)
        # along the axis of tokens like the inputs
        (new_k, new_v), pos, seg = last_tokens(
            [k.detach().transpose(1, 2), v.detach().transpose(1, 2)], place, self.size
        )
        return KeysValues(k, v, place, RememberedKV(new_k.transpose(1, 2), new_v.transpose(1, 2), pos, seg))

    def _again(self, state: RememberedInputs, x: Tensor, now: TokenPositions, project: ProjectKV) -> KeysValues:
        """Keys and values of the remembered inputs by the projections of this step."""
        place, size = join_positions(state.pos, state.seg, now), state.pos.shape[1]
        # where no row has padding, as many new tokens are all that will be remembered
        enough = x.shape[1] >= self.size and isinstance(place.layout, ContiguousLayout | AlignedLayout)
        tokens = x.detach() if enough else torch.cat([state.x.to(x.dtype), x.detach()], 1)
        (lately,), pos, seg = last_tokens([tokens], place, self.size)
        k, v = project(x, now)
        if size:
            # apart from the others, so that no gradient is calculated that nobody wants
            old = project(state.x.to(x.dtype), place.columns(0, size))
            k, v = _heads_first(old[0], k), _heads_first(old[1], v)
        return KeysValues(k, v, place, RememberedInputs(lately, pos, seg))

    def _write(self, old: RememberedBuffer, k: Tensor, v: Tensor, positions: TokenPositions) -> KeysValues:
        if torch.is_grad_enabled():
            raise ValueError(
                "a state with capacity is written in place: use it under torch.no_grad(), or start without"
            )
        count, begin = k.shape[2], old.end
        if begin + count > old.pos.shape[1]:
            old = self._moved(old, count)
            begin = old.end
        end = begin + count
        old.k.narrow(2, begin, count).copy_(k)
        old.v.narrow(2, begin, count).copy_(v)
        old.pos.narrow(1, begin, count).copy_(positions.position_ids)
        old.seg.narrow(1, begin, count).copy_(positions.segment_ids)
        used = old.begin, end - old.begin
        k, v = old.k.narrow(2, *used), old.v.narrow(2, *used)
        pos, seg = old.pos.narrow(1, *used), old.seg.narrow(1, *used)
        whole = TokenPositions(pos, seg, _layout(positions, begin - old.begin))
        if not isinstance(whole.layout, ContiguousLayout | AlignedLayout):
            # columns of padding are no tokens
            (new_k, new_v), pos, seg = last_tokens([k.transpose(1, 2), v.transpose(1, 2)], whole, self.size)
            kept = RememberedBuffer(new_k.transpose(1, 2), new_v.transpose(1, 2), pos, seg, 0, pos.shape[1])
            return KeysValues(k, v, whole, self._moved(kept, count))
        return KeysValues(k, v, whole, old._replace(begin=max(old.begin, end - self.size), end=end))

    def _moved(self, old: RememberedBuffer, count: int) -> RememberedBuffer:
        """The same in a new buffer, with room for `count` tokens and as many as the memory holds."""
        held = old.end - old.begin
        room = self.size + max(count, self.size)

        def moved(part: Tensor, axis: int) -> Tensor:
            shape = list(part.shape)
            shape[axis] = room
            new = part.new_zeros(shape)
            new.narrow(axis, 0, held).copy_(part.narrow(axis, old.begin, held))
            return new

        return RememberedBuffer(moved(old.k, 2), moved(old.v, 2), moved(old.pos, 1), moved(old.seg, 1), 0, held)

    def extra_repr(self) -> str:
        return f"size={self.size}"


def _heads_first(old: Float[Tensor, "b g m e"], new: Float[Tensor, "b g l e"]) -> Float[Tensor, "b g s e"]:
    """One after the other; in memory heads are outermost, as scores by distance want them."""
    return torch.cat([old.transpose(0, 1), new.transpose(0, 1)], 2).transpose(0, 1)


def join_positions(pos: Int[Tensor, "b m"], seg: Int[Tensor, "b m"], positions: TokenPositions) -> TokenPositions:
    """The places of remembered tokens and of those of this call."""
    if not pos.shape[1]:
        return positions
    if any(field is not None for field in (positions.roles, positions.tree)):
        raise ValueError("a memory keeps no roles and no trees of tokens; call without a state")
    rows = pos.shape[0]
    both = [
        torch.cat([old, new.expand(rows, -1)], 1)
        for old, new in ((pos, positions.position_ids), (seg, positions.segment_ids))
    ]
    return TokenPositions(both[0], both[1], _layout(positions, pos.shape[1]))


def _layout(positions: TokenPositions, before: int) -> ContiguousLayout | AlignedLayout | PackedLayout | None:
    """What is known of `before` columns of the same stream and those of `positions`."""
    known = positions.layout
    if isinstance(known, ContiguousLayout | AlignedLayout):
        return type(known)(known.start - before)
    # packed documents begin a stream
    return known if not before and isinstance(known, PackedLayout) else None


def last_tokens(
    parts: list[Float[Tensor, "b s ..."]], positions: TokenPositions, size: int
) -> tuple[list[Float[Tensor, "b m ..."]], Int[Tensor, "b m"], Int[Tensor, "b m"]]:
    """What the last `size` tokens of each row have; padding counts for nothing where there may be some."""
    pos, seg = (field.expand(parts[0].shape[0], -1) for field in (positions.position_ids, positions.segment_ids))
    if not isinstance(positions.layout, ContiguousLayout | AlignedLayout):
        order = (seg != PADDING_SEGMENT).byte().argsort(dim=1, stable=True)[:, -size:]
        rows = torch.arange(len(order), device=order.device)[:, None]
        return [part[rows, order] for part in parts], pos[rows, order], seg[rows, order]
    return [part[:, -size:] for part in parts], pos[:, -size:], seg[:, -size:]
