"""Softmax attention among the tokens of neighbouring chunks, over several ways of cutting them, with its own gradient.

What a token sees is the union over the ways: a pair that meets in several counts in the first alone, which is the same
as dividing its weight by the number of meetings (Kitaev et al. 2020, section 2, "multi-round LSH attention"). The ways
are then disjoint sets of keys: outputs are merged by their log-sum-exps, and the gradient of each is taken with the
merged output (Dao et al. 2022, arXiv:2205.14135, appendix B.4). Weights are kept for the gradient where they are few.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from manyformer.autocast import autocast_disabled
from manyformer.ops import attention_with_lse
from manyformer.ops.bucket_chunks import BucketChunks
from manyformer.ops.scratch_buffer import ScratchBuffer
from manyformer.ops.tile_softmax import KEPT, OutputGradient, TileCall, gradients, recompute_weights, sums, weights

PAIRS = {"cpu": 1 << 18}
"""Pairs of tokens that one call looks at: on a CPU as many as stay in its caches, elsewhere `MANY`."""

MANY = 1 << 26

HIDDEN = -1e30
"""What is added to the score of a pair for each reason not to see it: finite, so that nothing is ever nan."""

EMPTY, IDLE = -(1 << 22), -(1 << 21)
"""The marks of an empty slot as key and as query: far from each other and from all tokens."""

FEW = (1 << 20) - 1
"""So much of a bucket's number tells it from all others that are near: a float32 has no more than 24 digits."""


class ChunkVisibility(NamedTuple):
    """Ways of cutting tokens into chunks, and how many chunks one looks back and ahead.

    A token sees those of its bucket that stand before it if it is `causal`, else all others; itself only where it sees
    nothing else.
    """

    rounds: tuple[BucketChunks, ...]
    lookback: int
    lookahead: int
    causal: bool

    @property
    def wide(self) -> int:
        """How many chunks are seen from one."""
        return self.lookback + 1 + self.lookahead

    @property
    def pairs(self) -> int:
        """How many slots are looked at from all slots, over all ways."""
        return sum(way.tokens.numel() * self.wide * way.tokens.shape[1] for way in self.rounds)


def attend(
    q: Float[Tensor, "n e"], k: Float[Tensor, "n e"], v: Float[Tensor, "n f"], sight: ChunkVisibility, *, scale: float
) -> Float[Tensor, "n f"]:
    """Outputs for the tokens of all rows laid end to end, in float32 at least; what padding gets means nothing."""
    kind, wide = v.dtype, torch.promote_types(v.dtype, torch.float32)
    y: Tensor = _Attend.apply(*(x.to(wide) for x in (q, k, v)), sight, scale)  # type: ignore[no-untyped-call]
    return y.to(kind)


class SavedRounds(NamedTuple):
    """What is kept for the gradient: of every way the tokens in their slots, of every call its weights."""

    slots: list[Tensor]
    weights: list[Tensor]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sight: ChunkVisibility, scale: float) -> Tensor:
        keeps = any(ctx.needs_input_grad) and sight.pairs <= KEPT
        work = _Work(q, k, v, sight, scale, SavedRounds([], []) if keeps else None)
        with autocast_disabled(q.device):
            every = (work.forward(number) for number in work.numbers)
            y, lse = next(every, (torch.zeros_like(v), q.new_full(q.shape[:1], -torch.inf)))
            each = [lse.clone()]
            for new, other in every:
                attention_with_lse.merge_lse(y, lse, new, other)
                each.append(other)
        alone = (lse == -torch.inf).nonzero()[:, 0]
        y.index_copy_(0, alone, v.index_select(0, alone))
        slots, found = ([], []) if work.kept is None else work.kept
        ctx.save_for_backward(q, k, v, y, lse, alone, *each, *slots, *found)
        ctx.sight, ctx.scale, ctx.cuts = sight, scale, (len(each), len(each) + len(slots))
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, up: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, lse, alone, *more = ctx.saved_tensors
        each, slots, found = more[: ctx.cuts[0]], more[ctx.cuts[0] : ctx.cuts[1]], more[ctx.cuts[1] :]
        kept = SavedRounds(slots[::-1], found[::-1]) if slots else None
        work = _Work(q, k, v, ctx.sight, ctx.scale, kept)
        # what sees only itself has no share in any way
        slopes, lse = (up * y).sum(-1), lse.index_fill(0, alone, torch.inf)
        grads: list[Tensor] = []
        with autocast_disabled(q.device):
            for number, other in zip(work.numbers, each):
                new = work.backward(number, up, slopes, (other - lse).exp_())
                grads = [total.add_(one) for total, one in zip(grads, new)] if grads else new
        grads = grads or [torch.zeros_like(x) for x in (q, k, v)]
        grads[2].index_add_(0, alone, up.index_select(0, alone))
        return *grads, None, None


class _Work:
    """What going through all ways needs; what is `kept` is added at the end, and for the gradient taken from there."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, sight: ChunkVisibility, scale: float, kept: SavedRounds | None
    ) -> None:
        self.q, self.k, self.v, self.sight, self.scale, self.kept = q, k, v, sight, scale, kept
        self.numbers = [number for number, way in enumerate(sight.rounds) if len(way.tokens)]
        self.scratch = ScratchBuffer(q)

    def forward(self, number: int) -> tuple[Float[Tensor, "n f"], Float[Tensor, " n"]]:
        """What the tokens get from the keys that they meet in this way for the first time, and log-sum-exps."""
        way, slots = self.sight.rounds[number], self._slots(number)
        q, k, v = self._seen(slots)
        if self.kept is not None:
            self.kept.slots.extend(slots)
        # a slot more than there are, which is padding's
        y, lse = (v.new_empty(way.tokens.numel() + 1, *rest) for rest in (v.shape[-1:], ()))
        y[-1], lse[-1] = 0.0, -torch.inf
        outputs, numbers = y[:-1].view(*way.tokens.shape, -1), lse[:-1].view(way.tokens.shape)
        hidden = _Hidden(self.sight, number, q)
        for some in self._slices(way):
            call = TileCall(q[some], k[some], v[some], hidden(some, self.scratch), None)
            found = self.scratch("weights", *call.shape) if self.kept is None else q.new_empty(call.shape)
            scores = self.scratch("scores", *call.shape)
            weights(call, self.scale, scores, found)
            torch.bmm(found, call.v, out=outputs[some])
            numbers[some] = sums(call, scores, found)
            if self.kept is not None:
                self.kept.weights.append(found)
        lse.masked_fill_(lse < HIDDEN / 2, -torch.inf)
        return y.index_select(0, way.slot), lse.index_select(0, way.slot)

    def backward(self, number: int, up: Tensor, slopes: Tensor, share: Tensor) -> list[Tensor]:
        """What the pairs of this way contribute to the gradients."""
        way, before = self.sight.rounds[number], self.sight.lookback
        slots = self._slots(number) if self.kept is None else [self.kept.slots.pop() for _ in range(3)]
        q, k, v = self._seen(slots)
        # an empty slot shows the first token, whose gradient is not its own
        shares = _cut(share, way.tokens).masked_fill_(way.tokens < 0, 0.0)
        above = _cut(up, way.tokens).mul_(shares[..., None])
        slope = _cut(slopes, way.tokens).mul_(shares)[..., None]
        # room for a chunk on both sides, and for padding's slot
        count, size = way.tokens.shape
        frame = before + count + max(self.sight.lookahead, 1)
        totals = [x.new_empty(frame, size, x.shape[-1]) for x in (q, k, v)]
        for total in totals:
            # what no chunk has as the last one that it looks at
            total[: self.sight.wide - 1], total[before + count :] = 0.0, 0.0
        hidden = None if self.kept is not None else _Hidden(self.sight, number, q)
        for some in self._slices(way):
            call = TileCall(q[some], k[some], v[some], None if hidden is None else hidden(some, self.scratch), None)
            found = recompute_weights(call, self.scale, self.scratch) if self.kept is None else self.kept.weights.pop()
            to_q = totals[0][some.start + before : some.stop + before]
            others = [self.scratch(name, *x.shape) for name, x in (("to_k", call.k), ("to_v", call.v))]
            above_some = OutputGradient(above[some], slope[some])
            gradients(call, found, above_some, self.scratch, self.scale, [to_q, *others])
            for total, new in zip(totals[1:], others):
                *earlier, last = new.view(len(new), self.sight.wide, size, -1).unbind(1)
                # nobody has looked at these chunks before
                total[some.start + len(earlier) : some.stop + len(earlier)] = last
                for shift, one in enumerate(earlier):
                    total[some.start + shift : some.stop + shift] += one
        slot = way.slot + before * size
        return [total.flatten(0, 1).index_select(0, slot) for total in totals]

    def _slots(self, number: int) -> list[Float[Tensor, "c m e"]]:
        """Queries in their slots, and keys and values with empty chunks around them."""
        way, framed = self.sight.rounds[number], _framed(self.sight.rounds[number], self.sight)
        keys, values = _cut(self.k, framed), _cut(self.v, framed)
        # where queries are keys they are cut already
        before = self.sight.lookback
        q = keys[before : before + len(way.tokens)] if self.q is self.k else _cut(self.q, way.tokens)
        return [q, keys, values]

    def _seen(
        self, slots: list[Tensor]
    ) -> tuple[Float[Tensor, "c m e"], Float[Tensor, "c s e"], Float[Tensor, "c s f"]]:
        """Queries, and the keys and values that each chunk looks at."""
        q, keys, values = slots
        return q, _windows(keys, self.sight), _windows(values, self.sight)

    def _slices(self, way: BucketChunks) -> Iterator[slice]:
        """Some chunks at a time."""
        count, size = way.tokens.shape
        threads = torch.get_num_threads()
        most = PAIRS["cpu"] * threads if self.q.device.type == "cpu" else MANY
        step = max(most // (size * size * self.sight.wide), 1)
        return (slice(begin, min(begin + step, count)) for begin in range(0, count, step))


class _Hidden:
    """What is added to the scores of pairs that do not meet in this way for the first time.

    Numbers of tokens are compared as floating point numbers, which a CPU does several times faster than with truths.
    """

    def __init__(self, sight: ChunkVisibility, number: int, like: Tensor) -> None:
        self._sight, self._way = sight, sight.rounds[number]
        # neighbours among sorted tokens differ in the last digits
        bucket = (self._way.bucket & FEW).to(like.dtype)
        self._bucket = self._known(bucket, bucket)
        # twice the marks, so that looking back and ahead is the same distance to both sides
        marks = [2 * past.mark.to(like.dtype) for past in sight.rounds[:number]]
        self._earlier = [self._known(mark - (sight.lookback - sight.lookahead), mark) for mark in marks]
        self._never = _never(sight, self._way.tokens.shape[1], like.device).to(like.dtype) * HIDDEN

    def __call__(self, some: slice, scratch: ScratchBuffer) -> Float[Tensor, "p m s"]:
        """For some chunks; it holds until the next call."""
        shape = (some.stop - some.start, *self._never.shape)
        bias, other = scratch("bias", *shape), scratch("other", *shape)
        here, there = self._bucket
        torch.ne(here[some, :, None], there[some, None], out=other)
        torch.add(self._never, other, alpha=HIDDEN, out=bias)
        for here, there in self._earlier:
            torch.sub(here[some, :, None], there[some, None], out=other)
            bias.add_(other.abs_().le_(self._sight.lookback + self._sight.lookahead), alpha=HIDDEN)
        return bias

    def _known(
        self, mine: Float[Tensor, " n"], other: Float[Tensor, " n"]
    ) -> tuple[Float[Tensor, "c m"], Float[Tensor, "c s"]]:
        """A number of each token as a query and as a key; that of an empty slot is far from all others."""
        framed = _framed(self._way, self._sight)
        queries, keys = _cut(mine, self._way.tokens), _cut(other, framed)
        queries.masked_fill_(self._way.tokens < 0, IDLE)
        return queries, _windows(keys.masked_fill_(framed < 0, EMPTY), self._sight)


def _cut(x: Shaped[Tensor, "n *e"], tokens: Int[Tensor, "c m"]) -> Shaped[Tensor, "c m *e"]:
    """The tokens in their slots; what an empty one holds means nothing."""
    return x.index_select(0, tokens.flatten().clamp(min=0)).view(*tokens.shape, *x.shape[1:])


def _framed(way: BucketChunks, sight: ChunkVisibility) -> Int[Tensor, "k m"]:
    """The tokens of the chunks, with empty chunks before the first one and after the last."""
    return F.pad(way.tokens, [0, 0, sight.lookback, sight.lookahead], value=-1)


def _windows(x: Shaped[Tensor, "k m *e"], sight: ChunkVisibility) -> Shaped[Tensor, "c s *e"]:
    """What each chunk looks at, stretches of the framed chunks as overlapping views."""
    return x.as_strided((len(x) - sight.wide + 1, sight.wide * x.shape[1], *x.shape[2:]), x.stride())


def _never(sight: ChunkVisibility, size: int, device: torch.device) -> Bool[Tensor, "m s"]:
    """Which slots nobody may see: the own one, and the later ones, tokens of a bucket being in the document's order."""
    own = torch.arange(size, device=device)[:, None] + sight.lookback * size
    other = torch.arange(sight.wide * size, device=device)
    return other >= own if sight.causal else other == own
