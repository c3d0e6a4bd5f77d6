"""Softmax attention among the tokens of neighbouring chunks, over several ways of cutting them, with its own gradient.

What a token sees is the union over the ways: a pair that meets in several counts in the first alone, which is the same
as dividing its weight by the number of meetings (Kitaev et al. 2020, section 2, "multi-round LSH attention"). The ways
are then disjoint sets of keys: outputs are merged by their log-sum-exps, and the gradient of each is taken with the
merged output and log-sum-exp (Dao et al. 2022, arXiv:2205.14135, appendix B.4). Only outputs are kept in between.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from manyformer.ops import flash
from manyformer.ops.chunks import Chunks, together

PAIRS = {"cpu": 1 << 18}
"""Pairs of tokens that one call looks at: on a CPU as many as stay in its caches, elsewhere `MANY`."""

MANY = 1 << 26

EMPTY, IDLE = -(1 << 30), -(1 << 29)
"""The marks of an empty slot as key and as query: far from each other and from all tokens."""


class Sight(NamedTuple):
    """Ways of cutting tokens into chunks, and how many chunks one looks back and ahead.

    A token sees those of its bucket that stand before it if it is `causal`, else all others; itself only where it sees
    nothing else.
    """

    ways: tuple[Chunks, ...]
    before: int
    after: int
    causal: bool


def attend(
    q: Float[Tensor, "n e"], k: Float[Tensor, "n e"], v: Float[Tensor, "n f"], sight: Sight, *, scale: float
) -> Float[Tensor, "n f"]:
    """Outputs for the tokens of all rows laid end to end; what padding gets means nothing."""
    y: Tensor = _Attend.apply(q, k, v, sight, scale)  # type: ignore[no-untyped-call]
    return y


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sight: Sight, scale: float) -> Tensor:
        y = torch.zeros_like(v)
        lse = q.new_full(q.shape[:1], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
        for number, way in enumerate(sight.ways):
            if len(way.tokens):
                _merge(y, lse, *_forward(q, k, v, sight, number, scale))
        ctx.save_for_backward(q, k, v, y, lse)
        ctx.sight, ctx.scale = sight, scale
        return torch.where((lse == -torch.inf)[:, None], v, y)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, up: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, lse = ctx.saved_tensors
        alone = lse == -torch.inf
        # what sees only itself has no weights: with any finite number there, masked scores give zeros
        lse, upward = lse.masked_fill(alone, 0.0), up.masked_fill(alone[:, None], 0.0)
        grads = [torch.zeros_like(q), torch.zeros_like(k), up - upward]
        for number, way in enumerate(ctx.sight.ways):
            if len(way.tokens):
                _backward((q, k, v, upward, y, lse), grads, ctx.sight, number, ctx.scale)
        return *grads, None, None


def _forward(
    q: Tensor, k: Tensor, v: Tensor, sight: Sight, number: int, scale: float
) -> tuple[Float[Tensor, "n f"], Float[Tensor, " n"]]:
    """What the tokens get from the keys that they meet in this way alone, and log-sum-exps."""
    way = sight.ways[number]
    queries = _cut(q, way)
    keys, values = (_windows(_framed(_cut(x, way), sight), sight) for x in (k, v))
    # a slot more than there are, which is padding's
    y = v.new_zeros(way.tokens.numel() + 1, v.shape[-1])
    lse = torch.full_like(y[:, 0], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    for some, seen in _pieces(sight, number):
        found, sums = flash.forward(
            queries[some, None], keys[some, None], values[some, None], scale=scale, bias=_bias(seen, q)
        )
        # neither torch's number for rows that see nothing nor a nan of the written-out form
        blind = ~seen.any(-1)
        slots = slice(some.start * way.tokens.shape[1], some.stop * way.tokens.shape[1])
        y[slots] = found[:, 0].masked_fill(blind[..., None], 0.0).flatten(0, 1)
        lse[slots] = sums[:, 0].masked_fill(blind, -torch.inf).flatten()
    return y.index_select(0, way.slot), lse.index_select(0, way.slot)


def _merge(y: Tensor, lse: Tensor, new: Tensor, sums: Tensor) -> None:
    """Let `y` and `lse` also be about other keys."""
    after = torch.logaddexp(lse, sums)
    # where nothing is visible yet, -inf less -inf
    old, more = ((x - after).exp().nan_to_num(0.0)[:, None].to(y.dtype) for x in (lse, sums))
    y.mul_(old).addcmul_(new, more)
    lse.copy_(after)


def _backward(saved: tuple[Tensor, ...], grads: list[Tensor], sight: Sight, number: int, scale: float) -> None:
    """Add what the pairs of this way contribute to the gradients of queries, keys and values."""
    way, (q, k, v, *_) = sight.ways[number], saved
    queries, *_, upward, y, lse = (_cut(x, way) for x in saved)
    # an empty slot shows the first token, whose gradient is not its own
    upward = upward.masked_fill((way.tokens < 0)[..., None], 0.0)
    keys, values = (_windows(_framed(_cut(x, way), sight), sight) for x in (k, v))
    # room for a chunk on both sides, and for padding's slot
    count, size = way.tokens.shape
    room = (sight.before + count + max(sight.after, 1)) * size
    totals = [x.new_zeros(room, x.shape[-1]) for x in (q, k, v)]
    for some, seen in _pieces(sight, number):
        parts = [x[some, None] for x in (upward, queries, keys, values, y, lse)]
        to_q, to_k, to_v = flash.backward(*parts, scale=scale, bias=_bias(seen, q))
        own = slice((some.start + sight.before) * size, (some.stop + sight.before) * size)
        totals[0][own] = to_q.flatten(0, 2)
        for shift in range(sight.before + 1 + sight.after):
            here = slice((some.start + shift) * size, (some.stop + shift) * size)
            for total, new in zip(totals[1:], (to_k, to_v)):
                total[here] += new[:, 0, shift * size : (shift + 1) * size].flatten(0, 1)
    slot = way.slot + sight.before * size
    for grad, total in zip(grads, totals):
        grad += total.index_select(0, slot)


def _cut(x: Shaped[Tensor, "n *e"], way: Chunks) -> Shaped[Tensor, "c m *e"]:
    """The tokens in their slots; what an empty one holds means nothing."""
    return x.index_select(0, way.tokens.flatten().clamp(min=0)).view(*way.tokens.shape, *x.shape[1:])


def _framed(x: Tensor, sight: Sight, fill: int = 0) -> Tensor:
    """With empty chunks before the first one and after the last."""
    return F.pad(x, [0, 0] * (x.ndim - 1) + [sight.before, sight.after], value=fill)


def _windows(x: Tensor, sight: Sight) -> Tensor:
    """What each chunk looks at, (c, s, ...), as overlapping views of the framed chunks."""
    wide = sight.before + 1 + sight.after
    shape = (len(x) - wide + 1, wide * x.shape[1], *x.shape[2:])
    return x.as_strided(shape, x.stride())


def _pieces(sight: Sight, number: int) -> Iterator[tuple[slice, Bool[Tensor, "p m s"]]]:
    """Some chunks at a time, and which of their pairs meet in this way for the first time."""
    way = sight.ways[number]
    count, size = way.tokens.shape
    here, there = _both(way.bucket, sight, way)
    there, order = _windows(there, sight), _order(sight, size, way.tokens.device)
    earlier = [_both(other.mark, sight, way) for other in sight.ways[:number]]
    step = max(PAIRS.get(way.tokens.device.type, MANY) // order.numel(), 1)
    for begin in range(0, count, step):
        some = slice(begin, min(begin + step, count))
        seen = (here[some, :, None] == there[some, None]) & order
        if earlier:
            _forget(seen, begin, earlier, sight)
        yield some, seen


def _both(x: Int[Tensor, " n"], sight: Sight, way: Chunks) -> tuple[Int[Tensor, "c m"], Int[Tensor, "k m"]]:
    """What is known of each token in the slots, and in the framed ones, where nobody finds an empty slot."""
    cut, empty = _cut(x, way), way.tokens < 0
    return cut.masked_fill(empty, IDLE), _framed(cut.masked_fill(empty, EMPTY), sight, EMPTY)


def _order(sight: Sight, size: int, device: torch.device) -> Bool[Tensor, "m s"]:
    """Which of the slots that a chunk looks at may be seen: tokens of one bucket lie in the order of the document."""
    own = torch.arange(size, device=device)[:, None] + sight.before * size
    other = torch.arange((sight.before + 1 + sight.after) * size, device=device)
    return other < own if sight.causal else other != own


def _forget(seen: Bool[Tensor, "p m s"], begin: int, earlier: list[tuple[Tensor, Tensor]], sight: Sight) -> None:
    """Take out the pairs that met in one of the earlier ways; few are seen at all, so these are looked up."""
    _, size, wide = seen.shape
    index = seen.flatten().nonzero()[:, 0]
    query = index // wide
    mine, other = query + begin * size, (query // size + begin) * size + index % wide
    met = torch.zeros_like(index, dtype=torch.bool)
    for here, there in earlier:
        met |= together(here.flatten()[mine], there.flatten()[other], sight.before, sight.after)
    seen.view(-1)[index[met]] = False


def _bias(seen: Bool[Tensor, "p m s"], q: Tensor) -> Float[Tensor, "p 1 m s"]:
    bias = torch.zeros(seen.shape, dtype=q.dtype, device=q.device)
    return bias.masked_fill_(~seen, -torch.inf)[:, None]
