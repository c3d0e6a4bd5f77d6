"""Attention over what a mask shows and nothing else: exact, linear in visible blocks, with its own gradient.

A plan cuts the pairs of queries and keys into disjoint parts and each part into blocks. Blocks are gone through some at
a time, as views or gathered; parts are merged by their log-sum-exps, and the gradient of each is taken with the merged
output (Dao et al. 2022, arXiv:2205.14135, appendix B.4). Weights are kept for the gradient where they are few.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from manyformer.autocast import autocast_disabled
from manyformer.ops import attention_with_lse
from manyformer.ops.block_cover import BlockOrder
from manyformer.ops.scratch_buffer import ScratchBuffer
from manyformer.ops.sparse_plan import HeadGroup, MaskPart, SparsePlan
from manyformer.ops.tile_softmax import OutputGradient, TileCall, inner_gradient, recompute_weights, sums, weights
from manyformer.ops.tile_steps import TileStep, steps

KEPT = 1 << 26
"""Up to so many weights, a quarter of a GB, are kept for the gradient, which saves a sixth of the time."""

HELD = 1 << 24
"""Up to so many numbers of keys and values that were gathered, 64 MB, are kept for the gradient as well."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend(
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b g s e"],
    v: Float[Tensor, "b g s f"],
    plan: SparsePlan,
    *,
    scale: float,
) -> Float[Tensor, "b h l f"]:
    """Softmax attention over the pairs in `plan`, in float32 at least; a query that sees no key gets zeros."""
    kind, wide = v.dtype, torch.promote_types(v.dtype, torch.float32)
    y: Tensor = _Attend.apply(*(x.to(wide) for x in (q, k, v)), plan, scale)  # type: ignore[no-untyped-call]
    return y.to(kind)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: SparsePlan, scale: float) -> Tensor:
        q, k, v = (x.contiguous() for x in (q, k, v))
        batch, heads, length, _ = q.shape
        y = q.new_zeros(batch, heads, length, v.shape[-1])
        lse = q.new_full((batch, heads, length), -torch.inf)
        pairs, gathered = plan.pairs(batch), plan.gathered(batch) * (k.shape[-1] + v.shape[-1])
        keeps = any(ctx.needs_input_grad) and pairs <= KEPT
        work = _Work(scale, ScratchBuffer(q), keeps=keeps, holds=gathered <= HELD)
        with autocast_disabled(q.device):
            for row, lane, fresh in _each(plan, batch):
                mine = [_heads_of(x[row], lane, heads) for x in (q, k, v)]
                inside = [_heads_of(x[row], lane, heads) for x in (y, lse)]
                for number, part in enumerate(lane.parts):
                    work.forward(mine, inside, part, first=fresh and number == 0)
                if not _neighbours(lane):
                    y[row, list(lane.heads)], lse[row, list(lane.heads)] = inside
        y = _side_by_side(y)
        ctx.save_for_backward(q, k, v, y, lse)
        work.scratch.clear()
        ctx.plan, ctx.work = plan, work
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, up: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, lse = ctx.saved_tensors
        slopes, up = (up * y).sum(-1, keepdim=True), up.contiguous()
        # blind queries are none of any part's
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        grads = [torch.zeros_like(x) for x in (q, k, v)]
        work = ctx.work.again()
        with autocast_disabled(q.device):
            for row, lane, _ in _each(ctx.plan, q.shape[0]):
                mine = [_heads_of(x[row], lane, q.shape[1]) for x in (q, k, v, up, slopes, lse)]
                direct = [_neighbours(lane) and grad.shape[1] == q.shape[1] for grad in grads]
                found = [
                    _heads_of(grad[row], lane, q.shape[1]) if same else torch.zeros_like(x)
                    for grad, x, same in zip(grads, mine, direct)
                ]
                for part in lane.parts:
                    work.backward(mine, found, part)
                for grad, new, same in zip(grads, found, direct):
                    if not same:
                        # heads that share keys and values add up their gradients
                        group = torch.tensor(lane.heads, device=grad.device) * grad.shape[1] // q.shape[1]
                        grad[row].index_add_(0, group, new)
        work.scratch.clear()
        scales = (work.scale, work.scale, 1.0)
        return *(_side_by_side(grad, scale) for grad, scale in zip(grads, scales)), None, None


class _Work:
    """What the calls of all parts share, in their order: what is kept for the gradient, and log-sum-exps to be merged.

    Weights if it `keeps` them, and with them keys and values that were gathered if it `holds` those.
    """

    def __init__(self, scale: float, scratch: ScratchBuffer, *, keeps: bool, holds: bool) -> None:
        self.scale, self.scratch, self.keeps, self.holds = scale, scratch, keeps, holds
        self.kept: list[tuple[TileCall | None, Tensor]] = []
        self.lses: list[Tensor | None] = []

    def again(self) -> "_Work":
        """The same for going through all calls once more."""
        other = _Work(self.scale, self.scratch, keeps=self.keeps, holds=self.holds)
        other.kept, other.lses = self.kept[::-1], self.lses[::-1]
        return other

    def forward(self, mine: list[Tensor], inside: list[Tensor], part: MaskPart, *, first: bool) -> None:
        """Let the outputs and log-sum-exps `inside` of all queries also be about the part's keys."""
        q, k, v = (_blocks(x, order) for x, order in zip(mine, (part.q, part.k, part.k)))
        direct = (first or part.alone) and part.q.in_place
        y = _cut(inside[0], part.q) if direct else q.new_zeros(*q.shape[:3], v.shape[-1])
        lse = None if part.alone else q.new_full(q.shape[:3], -torch.inf)
        for step in steps(part, q.shape[0], q):
            call = _call(step, q, k, v)
            found = q.new_empty(call.shape) if self.keeps else self.scratch("weights", *call.shape)
            # a second piece of memory costs most
            scores = found if lse is None else self.scratch("scores", *call.shape)
            weights(call, self.scale, scores, found)
            step.put_product(found, call.v, y)
            if lse is not None:
                step.put(sums(call, scores, found), lse)
            if self.keeps:
                self.kept.append((call if self.holds else None, found))
        self.lses.append(lse)
        if lse is not None and direct:
            _cut(inside[1], part.q).copy_(lse)
        elif not direct:
            _merge(inside, part, y, lse, first=first)

    def backward(self, mine: list[Tensor], found: list[Tensor], part: MaskPart) -> None:
        """Add the part's gradients to `found`, those of the queries, keys and values in `mine`."""
        orders = (part.q, part.k, part.k)
        q, k, v = (_blocks(x, order) for x, order in zip(mine, orders))
        up, slopes, whole = (_blocks(x, part.q) for x in mine[3:])
        lse = self.lses.pop()
        if lse is not None:
            share = (lse - whole).exp_()[..., None]
            up, slopes = up * share, slopes * share
        totals = [
            _cut(total, order) if order.in_place else x.new_zeros(x.shape)
            for total, order, x in zip(found, orders, (q, k, v))
        ]
        for step in steps(part, q.shape[0], q):
            call, known = self._known(step, q, k, v)
            above = OutputGradient(step.queries(up), step.queries(slopes))
            inner = inner_gradient(call, known, above, self.scratch)
            (step.put_product if part.alone else step.add_product)(inner, call.k, totals[0])
            step.add_to_keys(inner, call.q, totals[1], self.scratch)
            step.add_to_keys(known, above.up, totals[2], self.scratch)
        for total, order, new in zip(found, orders, totals):
            if not order.in_place:
                _collect(total, order, new.flatten(1, 2)[:, : order.real])

    def _known(self, step: TileStep, q: Tensor, k: Tensor, v: Tensor) -> tuple[TileCall, Tensor]:
        """A call once more, and its weights."""
        call, found = self.kept.pop() if self.keeps else (None, None)
        call = _call(step, q, k, v) if call is None else call
        return call, recompute_weights(call, self.scale, self.scratch) if found is None else found


def _side_by_side(x: Float[Tensor, "b h l e"], scale: float = 1.0) -> Float[Tensor, "b h l e"]:
    """The same times `scale`, the heads of a token one after the other in memory, as projections want them."""
    into = x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)
    return into.copy_(x) if scale == 1.0 else torch.mul(x, scale, out=into)


def _collect(total: Float[Tensor, "h l e"], order: BlockOrder, new: Float[Tensor, "h t e"]) -> None:
    """Add to the tokens of an order what they got in that order."""
    if order.is_identity:
        total += new
        return
    tokens = order.tokens.to(new.device)
    # head by head: along any axis but the first it takes many times as long
    for one, more in zip(total, new):
        one.index_add_(0, tokens, more)


def _call(step: TileStep, q: Tensor, k: Tensor, v: Tensor) -> TileCall:
    short = tuple((rows, seen * k.shape[2]) for rows, seen in step.short)
    return TileCall(step.queries(q), step.keys(k), step.keys(v), step.bias, step.blind, short)


def _merge(into: list[Tensor], part: MaskPart, y: Tensor, lse: Tensor | None, *, first: bool) -> None:
    """Let the outputs `into` = [y, lse] of all queries also be about the part's keys, whose own come in blocks."""
    tokens = slice(None) if part.q.is_identity else part.q.tokens.to(y.device)
    y = y.flatten(1, 2)[:, : part.q.real]
    if lse is None:
        into[0][:, tokens] = y
        return
    lse = lse.flatten(1, 2)[:, : part.q.real]
    if first:
        into[0][:, tokens], into[1][:, tokens] = y, lse
    else:
        known = (into[0][:, tokens], into[1][:, tokens])
        attention_with_lse.merge_lse(known[0], known[1], y, lse)
        if not part.q.is_identity:
            into[0][:, tokens], into[1][:, tokens] = known


def _blocks(x: Float[Tensor, "h l *e"], order: BlockOrder) -> Float[Tensor, "h n c *e"]:
    """The tokens in that order, in blocks; what fills up the last block is zero."""
    if not order.is_identity:
        x = x.index_select(1, order.tokens.to(x.device))
    missing = order.blocks.numel() - order.real
    if missing:
        x = F.pad(x, [0, 0] * (x.ndim - 2) + [0, missing])
    return _cut(x, order)


def _cut(x: Float[Tensor, "h l *e"], order: BlockOrder) -> Float[Tensor, "h n c *e"]:
    """The blocks as a view."""
    return x.view(x.shape[0], *order.blocks.shape, *x.shape[2:])


def _each(plan: SparsePlan, batch: int) -> Iterator[tuple[int, HeadGroup, bool]]:
    """All lanes of all rows, and whether their heads come for the first time."""
    for row in range(batch):
        begun: set[int] = set()
        for lane in plan.rows[row % len(plan.rows)]:
            yield row, lane, begun.isdisjoint(lane.heads)
            begun.update(lane.heads)


def _neighbours(lane: HeadGroup) -> bool:
    """Whether its heads are one after another: those of a tensor are then a view."""
    return lane.heads[-1] - lane.heads[0] + 1 == len(lane.heads)


def _heads_of(x: Tensor, lane: HeadGroup, heads: int) -> Tensor:
    """The lane's heads of `x`, whose own heads may be shared by groups."""
    if _neighbours(lane) and x.shape[0] == heads:
        return x[lane.heads[0] : lane.heads[-1] + 1]
    return x[[head * x.shape[0] // heads for head in lane.heads]]
