"""Segment recurrence: what a layer was given before stands in front of what it is given now."""

from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.core import PADDING, Context, Lined, Packed, Place, Plain, State
from manyformer.hooks import Carried
from manyformer.sources.base import Keys, Project, Shape, Source


class Inputs(NamedTuple):
    """What the layer was given lately, and where: for training, whose projections change from step to step."""

    x: Float[Tensor, "b m d"]
    pos: Int[Tensor, "b m"]
    seg: Int[Tensor, "b m"]


class Lately(NamedTuple):
    """Keys and values of the same tokens: for writing and scoring, whose projections stay as they are."""

    k: Float[Tensor, "b g m e"]
    v: Float[Tensor, "b g m f"]
    pos: Int[Tensor, "b m"]
    seg: Int[Tensor, "b m"]


class Room(NamedTuple):
    """`Lately` in a buffer that is written in place: the columns from `begin` to before `end` are in use."""

    k: Float[Tensor, "b g room e"]
    v: Float[Tensor, "b g room f"]
    pos: Int[Tensor, "b room"]
    seg: Int[Tensor, "b room"]
    begin: int = 0
    end: int = 0


@final
class Remembered(Source, Carried):
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
            raise ValueError(f"Remembered: size ({size}) must be at least 1; a layer without a memory needs no source")
        self.size, self.dim = size, dim

    def start(
        self, batch: int, shape: Shape, *, folds: bool, capacity: int | None, device: torch.device, dtype: torch.dtype
    ) -> State:
        if folds:
            raise ValueError("Remembered: a kernel that folds keys into a summary has no use for a memory of tokens")
        pos = torch.zeros(batch, 0, dtype=torch.long, device=device)
        if self.training:
            return Inputs(torch.zeros(batch, 0, self.dim, device=device, dtype=dtype), pos, pos)
        # twice the memory: it is moved to the front once for as many tokens as it holds
        room = 0 if capacity is None else min(capacity, 2 * self.size)
        k = torch.zeros(batch, shape.kv_heads, room, shape.key, device=device, dtype=dtype)
        v = torch.zeros(batch, shape.kv_heads, room, shape.value, device=device, dtype=dtype)
        if capacity is None:
            return Lately(k, v, pos, pos)
        pos = torch.zeros(batch, room, dtype=torch.long, device=device)
        return Room(k, v, pos, torch.full_like(pos, PADDING))

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, project: Project, state: State, *, folds: bool) -> Keys:
        if state is None:
            return Keys(*project(x, ctx.place), ctx.place)
        if isinstance(state, Inputs):
            return self._again(state, x, ctx.place, project)
        k, v = project(x, ctx.place)
        if isinstance(state, Room):
            return self._write(state, k, v, ctx.place)
        k, v = (torch.cat([old.to(new.dtype), new], 2) for old, new in ((state.k, k), (state.v, v)))
        place = joined(state.pos, state.seg, ctx.place)
        # along the axis of tokens like the inputs
        (new_k, new_v), pos, seg = last([k.detach().transpose(1, 2), v.detach().transpose(1, 2)], place, self.size)
        return Keys(k, v, place, Lately(new_k.transpose(1, 2), new_v.transpose(1, 2), pos, seg))

    def _again(self, state: Inputs, x: Tensor, now: Place, project: Project) -> Keys:
        """Keys and values of the remembered inputs by the projections of this step."""
        place, size = joined(state.pos, state.seg, now), state.pos.shape[1]
        # where no row has padding, as many new tokens are all that will be remembered
        enough = x.shape[1] >= self.size and isinstance(place.layout, Plain | Lined)
        tokens = x.detach() if enough else torch.cat([state.x.to(x.dtype), x.detach()], 1)
        (lately,), pos, seg = last([tokens], place, self.size)
        k, v = project(x, now)
        if size:
            # apart from the others, so that no gradient is calculated that nobody wants
            old = project(state.x.to(x.dtype), place.columns(0, size))
            k, v = _heads_first(old[0], k), _heads_first(old[1], v)
        return Keys(k, v, place, Inputs(lately, pos, seg))

    def _write(self, old: Room, k: Tensor, v: Tensor, place: Place) -> Keys:
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
        old.pos.narrow(1, begin, count).copy_(place.pos)
        old.seg.narrow(1, begin, count).copy_(place.seg)
        used = old.begin, end - old.begin
        k, v = old.k.narrow(2, *used), old.v.narrow(2, *used)
        pos, seg = old.pos.narrow(1, *used), old.seg.narrow(1, *used)
        whole = Place(pos, seg, _layout(place, begin - old.begin))
        if not isinstance(whole.layout, Plain | Lined):
            # columns of padding are no tokens
            (new_k, new_v), pos, seg = last([k.transpose(1, 2), v.transpose(1, 2)], whole, self.size)
            kept = Room(new_k.transpose(1, 2), new_v.transpose(1, 2), pos, seg, 0, pos.shape[1])
            return Keys(k, v, whole, self._moved(kept, count))
        return Keys(k, v, whole, old._replace(begin=max(old.begin, end - self.size), end=end))

    def _moved(self, old: Room, count: int) -> Room:
        """The same in a new buffer, with room for `count` tokens and as many as the memory holds."""
        held = old.end - old.begin
        room = self.size + max(count, self.size)

        def moved(part: Tensor, axis: int) -> Tensor:
            shape = list(part.shape)
            shape[axis] = room
            new = part.new_zeros(shape)
            new.narrow(axis, 0, held).copy_(part.narrow(axis, old.begin, held))
            return new

        return Room(moved(old.k, 2), moved(old.v, 2), moved(old.pos, 1), moved(old.seg, 1), 0, held)

    def extra_repr(self) -> str:
        return f"size={self.size}"


def _heads_first(old: Float[Tensor, "b g m e"], new: Float[Tensor, "b g l e"]) -> Float[Tensor, "b g s e"]:
    """One after the other; in memory heads are outermost, as scores by distance want them."""
    return torch.cat([old.transpose(0, 1), new.transpose(0, 1)], 2).transpose(0, 1)


def joined(pos: Int[Tensor, "b m"], seg: Int[Tensor, "b m"], place: Place) -> Place:
    """The places of remembered tokens and of those of this call."""
    if not pos.shape[1]:
        return place
    if any(field is not None for field in (place.role, place.tree)):
        raise ValueError("a memory keeps no roles and no trees of tokens; call without a state")
    rows = pos.shape[0]
    both = [torch.cat([old, new.expand(rows, -1)], 1) for old, new in ((pos, place.pos), (seg, place.seg))]
    return Place(both[0], both[1], _layout(place, pos.shape[1]))


def _layout(place: Place, before: int) -> Plain | Lined | Packed | None:
    """What is known of `before` columns of the same stream and those of `place`."""
    known = place.layout
    if isinstance(known, Plain | Lined):
        return type(known)(known.start - before)
    # packed documents begin a stream
    return known if not before and isinstance(known, Packed) else None


def last(
    parts: list[Float[Tensor, "b s ..."]], place: Place, size: int
) -> tuple[list[Float[Tensor, "b m ..."]], Int[Tensor, "b m"], Int[Tensor, "b m"]]:
    """What the last `size` tokens of each row have; padding counts for nothing where there may be some."""
    pos, seg = (field.expand(parts[0].shape[0], -1) for field in (place.pos, place.seg))
    if not isinstance(place.layout, Plain | Lined):
        order = (seg != PADDING).byte().argsort(dim=1, stable=True)[:, -size:]
        rows = torch.arange(len(order), device=order.device)[:, None]
        return [part[rows, order] for part in parts], pos[rows, order], seg[rows, order]
    return [part[:, -size:] for part in parts], pos[:, -size:], seg[:, -size:]
