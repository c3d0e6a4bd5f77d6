"""Attention over what a mask shows and nothing else: exact, linear in visible blocks, with its own gradient.

A plan cuts the pairs of queries and keys into disjoint parts and each part into blocks. Every part is a few fused calls
on views or gathered blocks; parts are merged by their log-sum-exps, and the gradient of each is taken with the merged
output and log-sum-exp (Dao et al. 2022, arXiv:2205.14135, appendix B.4), so that only outputs are kept in between.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from manyformer.ops import flash
from manyformer.ops.cover import Order
from manyformer.ops.plan import Lane, Part, Plan, Tiles

GATHERED = 1 << 21
"""Numbers of keys that one call may gather: enough to be fast, few enough to stay in the allocator's reach."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend(
    q: Float[Tensor, "b h l e"], k: Float[Tensor, "b g s e"], v: Float[Tensor, "b g s f"], plan: Plan, *, scale: float
) -> Float[Tensor, "b h l f"]:
    """Softmax attention over the pairs in `plan`; a query that sees no key gets zeros."""
    y: Tensor = _Attend.apply(q, k, v, plan, scale)  # type: ignore[no-untyped-call]
    return y


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float) -> Tensor:
        batch, heads, length, _ = q.shape
        # heads inside, so that laying them side by side afterwards is only a view
        y = q.new_zeros(batch, length, heads, v.shape[-1]).transpose(1, 2)
        lse = q.new_full((batch, heads, length), -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
        for row, lane in _each(plan, batch):
            mine = [_heads_of(x[row], lane, heads) for x in (q, k, v)]
            inside = [x[row] if _all(lane, heads) else x[row, list(lane.heads)] for x in (y, lse)]
            for number, part in enumerate(lane.parts):
                _merge(inside, part, *_forward(mine, part, scale), first=number == 0)
            if not _all(lane, heads):
                y[row, list(lane.heads)], lse[row, list(lane.heads)] = inside
        ctx.save_for_backward(q, k, v, y, lse)
        ctx.plan, ctx.scale = plan, scale
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, up: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, lse = ctx.saved_tensors
        # blind queries have no weights: with any finite number there, their masked scores give zeros
        lse = lse.masked_fill(lse == -torch.inf, 0.0)
        grads = [torch.zeros_like(x) for x in (q, k, v)]
        for row, lane in _each(ctx.plan, q.shape[0]):
            mine = [_heads_of(x[row], lane, q.shape[1]) for x in (q, k, v, y, lse, up)]
            direct = [_all(lane, q.shape[1]) and grad.shape[1] == q.shape[1] for grad in grads]
            found = [grad[row] if same else torch.zeros_like(x) for grad, x, same in zip(grads, mine, direct)]
            for part in lane.parts:
                _backward(mine, found, part, ctx.scale)
            for grad, new, same in zip(grads, found, direct):
                if not same:
                    # heads that share keys and values add up their gradients
                    group = torch.tensor(lane.heads, device=grad.device) * grad.shape[1] // q.shape[1]
                    grad[row].index_add_(0, group, new)
        return *grads, None, None


class Views(NamedTuple):
    """The tensors of one call, (n, h, tokens, width), and what torch adds to the scores."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None


def _forward(mine: list[Tensor], part: Part, scale: float) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps of the part's queries, in its order."""
    q, k, v = (_blocks(x, order) for x, order in zip(mine, (part.q, part.k, part.k)))
    y = q.new_zeros(*q.shape[:3], v.shape[-1])
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    for tiles in part.tiles:
        for piece in _pieces(tiles, q, part):
            views = _views(piece, q, k, v)
            some, sums = flash.forward(views.q, views.k, views.v, scale=scale, bias=views.bias)
            if piece.blind is not None:
                # neither torch's number for such rows nor a nan of the written-out form
                blind = piece.blind[:, None].to(q.device)
                some, sums = some.masked_fill(blind[..., None], 0.0), sums.masked_fill(blind, -torch.inf)
            _put(piece, some.transpose(0, 1), y)
            _put(piece, sums.transpose(0, 1), lse)
    return tuple(x.flatten(1, 2)[:, : part.q.real] for x in (y, lse))  # type: ignore[return-value]


def _merge(into: list[Tensor], part: Part, y: Tensor, lse: Tensor, *, first: bool) -> None:
    """Let the outputs `into` = [y, lse] of all queries also be about the part's keys."""
    tokens = slice(None) if part.q.natural else part.q.tokens.to(y.device)
    if first:
        into[0][:, tokens], into[1][:, tokens] = y, lse
        return
    known = (into[0][:, tokens], into[1][:, tokens])
    flash.merge(known[0], known[1], y, lse)
    if not part.q.natural:
        into[0][:, tokens], into[1][:, tokens] = known


def _backward(mine: list[Tensor], found: list[Tensor], part: Part, scale: float) -> None:
    """Add the part's gradients to `found`, those of the queries, keys and values in `mine`."""
    q, y, lse, up = (_blocks(mine[number], part.q) for number in (0, 3, 4, 5))
    k, v = (_blocks(x, part.k) for x in mine[1:3])
    orders = (part.q, part.k, part.k)
    whole = [order.natural and order.real == order.blocks.numel() for order in orders]
    totals = [
        _cut(total, order) if direct else torch.zeros_like(x)
        for total, order, direct, x in zip(found, orders, whole, (q, k, v))
    ]
    for tiles in part.tiles:
        for piece in _pieces(tiles, q, part):
            views = _views(piece, q, k, v)
            upward, outputs, sums = (_rows(piece, x).transpose(0, 1) for x in (up, y, lse))
            dq, dk, dv = flash.backward(upward, views.q, views.k, views.v, outputs, sums, scale=scale, bias=views.bias)
            _add(piece, dq.transpose(0, 1), totals[0])
            _scatter(piece, dk, totals[1])
            _scatter(piece, dv, totals[2])
    for total, order, direct, new in zip(found, orders, whole, totals):
        if not direct:
            new = new.flatten(1, 2)[:, : order.real]
            total.index_add_(1, order.tokens.to(new.device), new)


def _blocks(x: Float[Tensor, "h l *e"], order: Order) -> Float[Tensor, "h n c *e"]:
    """The tokens in that order, in blocks; what fills up the last block is zero."""
    if not order.natural:
        x = x.index_select(1, order.tokens.to(x.device))
    missing = order.blocks.numel() - order.real
    if missing:
        x = F.pad(x, [0, 0] * (x.ndim - 2) + [0, missing])
    return _cut(x, order)


def _cut(x: Float[Tensor, "h l *e"], order: Order) -> Float[Tensor, "h n c *e"]:
    """The blocks as a view."""
    return x.view(x.shape[0], *order.blocks.shape, *x.shape[2:])


def _pieces(tiles: Tiles, q: Tensor, part: Part) -> Iterator[Tiles]:
    """The same in pieces that gather no more than is good."""
    each = q.shape[0] * tiles.columns.shape[1] * part.k.size * q.shape[-1]
    chunk = max(GATHERED // max(each, 1), 1)
    for begin in range(0, len(tiles.rows), chunk):
        some = slice(begin, begin + chunk)
        inner, blind = (x if x is None or len(x) == 1 else x[some] for x in (tiles.inner, tiles.blind))
        yield Tiles(tiles.rows[some], tiles.columns[some], tiles.step, inner, blind)


def _views(tiles: Tiles, q: Tensor, k: Tensor, v: Tensor) -> Views:
    bias = None
    if tiles.inner is not None:
        bias = torch.zeros(tiles.inner.shape, dtype=q.dtype, device=q.device)
        bias = bias.masked_fill_(~tiles.inner.to(q.device), -torch.inf)[:, None]
    return Views(_rows(tiles, q).transpose(0, 1), _keys(tiles, k), _keys(tiles, v), bias)


def _rows(tiles: Tiles, x: Float[Tensor, "h n c *e"]) -> Float[Tensor, "h r c *e"]:
    """The blocks of queries, a view where they are neighbours."""
    if tiles.step is not None:
        return x.narrow(1, int(tiles.rows[0]), len(tiles.rows))
    return x.index_select(1, tiles.rows.to(x.device))


def _put(tiles: Tiles, new: Float[Tensor, "h r c *e"], into: Float[Tensor, "h n c *e"]) -> None:
    if tiles.step is not None:
        _rows(tiles, into).copy_(new)
    else:
        into.index_copy_(1, tiles.rows.to(into.device), new)


def _add(tiles: Tiles, new: Float[Tensor, "h r c *e"], into: Float[Tensor, "h n c *e"]) -> None:
    if tiles.step is not None:
        _rows(tiles, into).add_(new)
    else:
        into.index_add_(1, tiles.rows.to(into.device), new)


def _keys(tiles: Tiles, x: Float[Tensor, "h n c e"]) -> Float[Tensor, "r h s e"]:
    """What each row sees, its blocks laid end to end; overlapping views where they are neighbours."""
    rows, most = tiles.columns.shape
    if tiles.step is None:
        gathered = x.index_select(1, tiles.columns.flatten().to(x.device))
        return gathered.view(x.shape[0], rows, -1, x.shape[-1]).transpose(0, 1)
    head, block, token, channel = x.stride()
    begin = x.storage_offset() + int(tiles.columns[0, 0]) * block
    shape = (rows, x.shape[0], most * x.shape[2], x.shape[-1])
    return x.as_strided(shape, (tiles.step * block, head, token, channel), begin)


def _scatter(tiles: Tiles, new: Float[Tensor, "r h s e"], into: Float[Tensor, "h n c e"]) -> None:
    """Add the gradients of what each row saw to the blocks that it came from."""
    rows, most = tiles.columns.shape
    parts = new.transpose(0, 1).view(new.shape[1], rows, most, -1, new.shape[-1])
    begin = int(tiles.columns[0, 0])
    if tiles.step == 0:
        into.narrow(1, begin, most).add_(parts.sum(1))
    elif tiles.step == 1:
        for number in range(most):
            into.narrow(1, begin + number, rows).add_(parts[:, :, number])
    else:
        into.index_add_(1, tiles.columns.flatten().to(into.device), parts.flatten(1, 2))


def _each(plan: Plan, batch: int) -> Iterator[tuple[int, Lane]]:
    for row in range(batch):
        for lane in plan.rows[row % len(plan.rows)]:
            yield row, lane


def _all(lane: Lane, heads: int) -> bool:
    return len(lane.heads) == heads


def _heads_of(x: Tensor, lane: Lane, heads: int) -> Tensor:
    """The lane's heads of `x`, whose own heads may be shared by groups."""
    if _all(lane, heads) and x.shape[0] == heads:
        return x
    return x[[head * x.shape[0] // heads for head in lane.heads]]
