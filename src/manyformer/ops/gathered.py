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
from manyformer.ops.chunks import Chunks

PAIRS = {"cpu": 1 << 17}
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
        y, lse = torch.zeros_like(v), _unseen(q)
        for number, way in enumerate(sight.ways):
            if len(way.tokens):
                flash.merge(y, lse, *_forward(q, k, v, sight, number, scale))
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


def _unseen(x: Float[Tensor, "n e"]) -> Float[Tensor, " n"]:
    """Log-sum-exps of nothing."""
    return x.new_full(x.shape[:1], -torch.inf, dtype=torch.promote_types(x.dtype, torch.float32))


def _forward(
    q: Tensor, k: Tensor, v: Tensor, sight: Sight, number: int, scale: float
) -> tuple[Float[Tensor, "n f"], Float[Tensor, " n"]]:
    """What the tokens get from the keys that they meet in this way alone, and log-sum-exps."""
    way = sight.ways[number]
    queries, keys, values = _cut(q, way.tokens), *(_around(x, way, sight) for x in (k, v))
    # a slot more than there are, which is padding's
    y = v.new_empty(way.tokens.numel() + 1, v.shape[-1])
    lse = _unseen(y)
    y[-1] = 0.0
    for some, bias, blind in _pieces(sight, number, q.dtype):
        found, sums = flash.forward(queries[some, None], keys[some, None], values[some, None], scale=scale, bias=bias)
        slots = slice(some.start * blind.shape[1], some.stop * blind.shape[1])
        # neither torch's number for rows that see nothing nor a nan of the written-out form
        y[slots] = found.flatten(0, 2).masked_fill_(blind.view(-1, 1), 0.0)
        lse[slots] = sums.flatten().masked_fill_(blind.flatten(), -torch.inf)
    return y.index_select(0, way.slot), lse.index_select(0, way.slot)


def _backward(saved: tuple[Tensor, ...], grads: list[Tensor], sight: Sight, number: int, scale: float) -> None:
    """Add what the pairs of this way contribute to the gradients of queries, keys and values."""
    way, (q, k, v, *_) = sight.ways[number], saved
    queries, upward, y, lse = (_cut(saved[part], way.tokens) for part in (0, 3, 4, 5))
    # an empty slot shows the first token, whose gradient is not its own
    upward.masked_fill_((way.tokens < 0)[..., None], 0.0)
    keys, values = (_around(x, way, sight) for x in (k, v))
    # room for a chunk on both sides, and for padding's slot
    count, size = way.tokens.shape
    room = (sight.before + count + max(sight.after, 1)) * size
    totals = [x.new_zeros(room, x.shape[-1]) for x in (q, k, v)]
    for some, bias, _ in _pieces(sight, number, q.dtype):
        parts = [x[some, None] for x in (upward, queries, keys, values, y, lse)]
        to_q, to_k, to_v = flash.backward(*parts, scale=scale, bias=bias)
        own = slice((some.start + sight.before) * size, (some.stop + sight.before) * size)
        totals[0][own] = to_q.flatten(0, 2)
        for shift in range(sight.before + 1 + sight.after):
            here = slice((some.start + shift) * size, (some.stop + shift) * size)
            for total, new in zip(totals[1:], (to_k, to_v)):
                total[here] += new[:, 0, shift * size : (shift + 1) * size].flatten(0, 1)
    slot = way.slot + sight.before * size
    for grad, total in zip(grads, totals):
        grad += total.index_select(0, slot)


def _cut(x: Shaped[Tensor, "n *e"], tokens: Int[Tensor, "c m"]) -> Shaped[Tensor, "c m *e"]:
    """The tokens in their slots; what an empty one holds means nothing."""
    return x.index_select(0, tokens.flatten().clamp(min=0)).view(*tokens.shape, *x.shape[1:])


def _framed(way: Chunks, sight: Sight) -> Int[Tensor, "k m"]:
    """The tokens of the chunks, with empty chunks before the first one and after the last."""
    return F.pad(way.tokens, [0, 0, sight.before, sight.after], value=-1)


def _around(x: Shaped[Tensor, "n *e"], way: Chunks, sight: Sight) -> Shaped[Tensor, "c s *e"]:
    """What each chunk looks at."""
    return _windows(_cut(x, _framed(way, sight)), sight)


def _windows(x: Shaped[Tensor, "k m *e"], sight: Sight) -> Shaped[Tensor, "c s *e"]:
    """Stretches of the framed chunks, as overlapping views."""
    wide = sight.before + 1 + sight.after
    return x.as_strided((len(x) - wide + 1, wide * x.shape[1], *x.shape[2:]), x.stride())


def _pieces(
    sight: Sight, number: int, dtype: torch.dtype
) -> Iterator[tuple[slice, Float[Tensor, "p 1 m s"], Bool[Tensor, "p m"]]]:
    """Some chunks at a time; -inf for pairs that do not meet in this way for the first time; queries that see nothing.

    What is given is overwritten by the next piece: large new tensors cost more than what is computed in them.
    """
    way = sight.ways[number]
    count, size = way.tokens.shape
    here, there = _known(way.bucket, way.bucket, way, sight)
    never = _never(sight, size, way.tokens.device)
    # twice the marks, so that looking back and ahead is the same distance to both sides
    lead = sight.before - sight.after
    earlier = [_known(2 * past.mark - lead, 2 * past.mark, way, sight) for past in sight.ways[:number]]
    step = min(max(PAIRS.get(way.tokens.device.type, MANY) // never.numel(), 1), count)
    hidden, met = (never.new_empty(step, *never.shape) for _ in range(2))
    apart = way.mark.new_empty(hidden.shape)
    bias = torch.empty(hidden.shape, dtype=dtype, device=hidden.device)
    for begin in range(0, count, step):
        some = slice(begin, min(begin + step, count))
        mine, again, far, out = (x[: some.stop - begin] for x in (hidden, met, apart, bias))
        torch.ne(here[some, :, None], there[some, None], out=mine)
        mine |= never
        for one, other in earlier:
            torch.sub(one[some, :, None], other[some, None], out=far)
            mine |= torch.le(far.abs_(), sight.before + sight.after, out=again)
        yield some, out.zero_().masked_fill_(mine, -torch.inf)[:, None], mine.all(-1)


def _known(
    mine: Int[Tensor, " n"], other: Int[Tensor, " n"], way: Chunks, sight: Sight
) -> tuple[Int[Tensor, "c m"], Int[Tensor, "c s"]]:
    """A number of each token as a query and as a key; that of an empty slot is far from all others."""
    framed = _framed(way, sight)
    queries, keys = _cut(mine, way.tokens), _cut(other, framed)
    return queries.masked_fill_(way.tokens < 0, IDLE), _windows(keys.masked_fill_(framed < 0, EMPTY), sight)


def _never(sight: Sight, size: int, device: torch.device) -> Bool[Tensor, "m s"]:
    """Which slots nobody may see: the own one, and the later ones, tokens of a bucket being in the document's order."""
    own = torch.arange(size, device=device)[:, None] + sight.before * size
    other = torch.arange((sight.before + 1 + sight.after) * size, device=device)
    return other >= own if sight.causal else other == own
