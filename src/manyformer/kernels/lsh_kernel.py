"""Attention among tokens whose vectors point in similar directions, found by hashing instead of by comparing all."""

from typing import Literal, NamedTuple, final, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.autocast import autocast_disabled
from manyformer.core import PADDING_SEGMENT, LayerOutput, State, TokenPositions, WatchFn, no_watch
from manyformer.kernels.kernel import Kernel
from manyformer.ops import bucket_chunks, chunk_gather_attention, cluster_attention, counter_random, lsh_hashing
from manyformer.ops import softmax_attention as ops
from manyformer.ops.bucket_chunks import ROOM, BucketChunks, ChunkUnit
from manyformer.ops.chunk_gather_attention import ChunkVisibility
from manyformer.position import Position
from manyformer.recompute import choose_once
from manyformer.training_hooks import PostStepUpdate

LSHVariant = Literal["strict", "published"]
LSHPath = Literal["naive", "sorted", "remembered"]

EPSILON = 1e-6

WIDE = 1 << 32
"""A mark is the bucket times this many and the number of the chunk in it."""


class LSHState(NamedTuple):
    """The bucket and the chunk in it of each token so far, in each round, as one number; None before any token."""

    mark: Int[Tensor, "b h r s"] | None = None


class LSHPathChoice(NamedTuple):
    """A way of computing and the reason for it."""

    way: LSHPath
    why: str


@final
class LSHKernel(Kernel, PostStepUpdate):
    """Locality-sensitive hashing attention (Kitaev et al. 2020, section 2) of a stream to itself.

    Queries are the keys of their tokens; keys have length 1. In each of `rounds` rounds random rotations put every
    token into one of `buckets`, tokens are sorted by bucket and position and cut into chunks of `chunk`, and a token
    attends to those of its own bucket in its own chunk, `before` chunks back and `after` ahead. It attends to itself
    only where it sees nothing else. A pair that meets in several rounds counts once. With `after` a token also sees
    what stands later in its document.

    The form "published" sorts whole documents: borders of chunks, and so outputs, depend on later tokens. One of at
    most `chunk` tokens is attended to in full. In the form "strict" each bucket begins a chunk of its own, so that
    what a token sees depends on the past alone, and writing goes on from a state.

    Scores are multiplied by `scale`, as published 1: the length of a query alone says how sharply it attends. Where
    keys must first come to be alike, that is too sharply from the start (see `reformer`).

    Rotations follow from the buffers `seed` and `number`: with `redraw` they are drawn anew after so many training
    steps. `rounds` is no weight and may be set at any time; the first rounds stay the same. `path` forces a way:
    "naive" (all pairs written out, which a watcher of weights also gets) or "sorted". Raises ValueError for what it
    cannot do.
    """

    supports = frozenset({"query", "key"})
    tied_qk = True
    content_based = True

    def __init__(
        self,
        *,
        buckets: int,
        chunk: int,
        rounds: int,
        before: int = 1,
        after: int = 0,
        form: LSHVariant = "strict",
        redraw: int | None = 1,
        scale: float = 1.0,
        path: Literal["auto", "naive", "sorted"] = "auto",
    ) -> None:
        super().__init__()
        for name, value in (("chunk", chunk), ("rounds", rounds), ("redraw", redraw)):
            if value is not None and value < 1:
                raise ValueError(f"LSH: {name} ({value}) must be at least 1")
        if not scale > 0:
            raise ValueError(f"LSH: scale ({scale}) must be above 0")
        if min(before, after) < 0:
            raise ValueError(f"LSH: before ({before}) and after ({after}) must be at least 0 chunks")
        if form not in get_args(LSHVariant):
            raise ValueError(f"LSH: form '{form}' must be one of {', '.join(get_args(LSHVariant))}")
        if form == "strict" and after:
            raise ValueError(f"LSH: after ({after}) must be 0 in the form 'strict', which sees nothing later")
        self.factors, self.buckets = lsh_hashing.bucket_factors(buckets), buckets
        self.chunk, self.rounds, self.before, self.after = chunk, rounds, before, after
        self.form, self.redraw, self.scale, self.path = form, redraw, scale, path
        seed = torch.empty((), dtype=torch.long, device="cpu").random_(2**40)
        self.register_buffer("seed", seed.to(torch.empty(0).device))
        self.register_buffer("number", torch.zeros((), dtype=torch.long))

    seed: Tensor
    number: Tensor

    def after_step(self, step: int) -> None:
        if self.redraw is not None:
            self.number.fill_(step // self.redraw)

    def init_state(self, batch: int, *, device: torch.device, dtype: torch.dtype) -> State:
        return LSHState()

    def forward(
        self,
        q: Float[Tensor, "b h l e"],
        k: Float[Tensor, "b h s e"],
        v: Float[Tensor, "b h s f"],
        query_positions: TokenPositions,
        key_positions: TokenPositions,
        position: Position,
        state: State = None,
        watch: WatchFn = no_watch,
    ) -> LayerOutput:
        way = self._choose(q, k, state, watch).way
        with autocast_disabled(q.device):
            keys = normalize_keys(k).to(v.dtype)
        found: LayerOutput = self._attend(
            q.to(v.dtype), keys, v, query_positions, key_positions, position, state, watch, way
        )
        return found

    def explain(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        query_positions: TokenPositions,
        key_positions: TokenPositions,
        position: Position,
        state: State = None,
        watch: WatchFn = no_watch,
    ) -> str:
        choice = self._choose(q, k, state, watch)
        return f"{choice.way}: {choice.why}"

    def extra_repr(self) -> str:
        sizes = f"{self.rounds} rounds, {self.buckets} buckets, chunks of {self.chunk}"
        return (
            f"{sizes}, before={self.before}, after={self.after}, {self.form}, redraw={self.redraw}, scale={self.scale}"
        )

    def _choose(self, q: Tensor, k: Tensor, state: State, watch: WatchFn) -> LSHPathChoice:
        if state is not None and self.form != "strict":
            raise ValueError(
                f"LSH: the form '{self.form}' cannot go on from a state, because later tokens move the borders of "
                "its chunks: form='strict' can"
            )
        if state is not None and state.mark is not None:
            return LSHPathChoice("remembered", "the buckets of earlier tokens are known")
        if q.shape[2] != k.shape[2]:
            raise ValueError(f"LSH takes queries for keys: {q.shape[2]} and {k.shape[2]} cannot be those of one stream")
        if self.path != "auto":
            return LSHPathChoice(self.path, "forced")
        if watch is not no_watch:
            return LSHPathChoice("naive", "the weights are watched, and only the written-out form has them")
        return LSHPathChoice("sorted", f"{self.rounds} rounds of {self.buckets} buckets in chunks of {self.chunk}")

    # sorting and cutting follow the numbers in the tensors, which no graph can
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        query_positions: TokenPositions,
        key_positions: TokenPositions,
        position: Position,
        state: LSHState | None,
        watch: WatchFn,
        way: LSHPath,
    ) -> LayerOutput:
        bucket = choose_once(lambda: self._hash(q))
        if self.form == "published":
            bucket = bucket.masked_fill(
                (bucket_chunks.document_lengths(key_positions.segment_ids) <= self.chunk)[:, None], 0
            )
        if way == "remembered":
            assert state is not None
            known = _next(state, bucket, key_positions, self.chunk)
            mask = self._seen(known[..., -q.shape[2] :], known, query_positions, key_positions)
            return LayerOutput(
                ops.naive(
                    q,
                    k,
                    v,
                    mask,
                    scale=self.scale,
                    position=position,
                    query_positions=query_positions,
                    key_positions=key_positions,
                )[0],
                LSHState(known),
            )
        ways = tuple(self._cut(key_positions, one) for one in bucket)
        kept = None if state is None else LSHState(_marks(bucket, ways, self.chunk))
        if way == "sorted":
            return LayerOutput(self._gathered(q, k, v, ways), kept)
        mark = torch.stack([_by_head(part.mark, bucket) for part in ways], 2)
        y, weights = ops.naive(
            q,
            k,
            v,
            self._seen(mark, mark, query_positions, key_positions),
            scale=self.scale,
            position=position,
            query_positions=query_positions,
            key_positions=key_positions,
        )
        watch(self, "weights", weights)
        return LayerOutput(y, kept)

    @torch.no_grad()
    def _hash(self, q: Float[Tensor, "b h l e"]) -> Int[Tensor, "r b h l"]:
        """The buckets of all tokens in all rounds."""
        with autocast_disabled(q.device):
            wide = q.to(torch.promote_types(q.dtype, torch.float32))
            seed = self.seed + counter_random.splitmix64(self.number)
            found = lsh_hashing.buckets(
                wide, lsh_hashing.rotations(seed, self.rounds, q.shape[1], q.shape[3], self.factors)
            )
        # few numbers to keep for the second time
        return q.new_zeros(self.rounds, *q.shape[:3], dtype=torch.int32) if found is None else found.int()

    def _cut(self, key_positions: TokenPositions, bucket: Int[Tensor, "b h l"]) -> BucketChunks:
        """The chunks of one round, all heads of all rows one after the other."""
        seg, mine = key_positions.segment_ids[:, None].expand(bucket.shape).flatten(0, 1), bucket.flatten(0, 1)
        unit: ChunkUnit = "bucket" if self.form == "strict" else "document"
        reach = self.before + self.after
        return bucket_chunks.sort_into_chunks(mine, seg, self.chunk, unit=unit, reach=reach, beside=bucket.shape[1])

    def _gathered(self, q: Tensor, k: Tensor, v: Tensor, ways: tuple[BucketChunks, ...]) -> Tensor:
        sight = ChunkVisibility(ways, self.before, self.after, causal=not self.after)
        # views where heads lie side by side
        queries, keys, values = (x.transpose(1, 2).flatten(0, 2) for x in (q, k, v))
        y = chunk_gather_attention.attend(queries, keys, values, sight, scale=self.scale)
        return y.view(q.shape[0], q.shape[2], q.shape[1], -1).transpose(1, 2)

    def _seen(
        self,
        mark: Int[Tensor, "b h r l"],
        other: Int[Tensor, "b h r s"],
        query_positions: TokenPositions,
        key_positions: TokenPositions,
    ) -> Bool[Tensor, "b h l s"]:
        """Which keys each query attends to: those that it meets in any round, or itself alone."""
        here, there = query_positions.position_ids[:, None, :, None], key_positions.position_ids[:, None, None]
        same = (query_positions.segment_ids[:, None, :, None] == key_positions.segment_ids[:, None, None]) & (
            key_positions.segment_ids != PADDING_SEGMENT
        )[:, None, None]
        allowed = same & (here != there if self.after else here > there)
        met = torch.zeros_like(allowed)
        for number in range(mark.shape[2]):
            marks = mark[:, :, number, :, None], other[:, :, number, None]
            met = met | bucket_chunks.same_or_adjacent(*marks, self.before, self.after)
        return cluster_attention.fall_back_to_self(met & allowed, same & (here == there))


def normalize_keys(k: Float[Tensor, "b h s e"]) -> Float[Tensor, "b h s e"]:
    """Keys of length 1, in float32 at least; the small number is that of the released code."""
    wide = k.to(torch.promote_types(k.dtype, torch.float32))
    return wide * (wide.square().sum(-1, keepdim=True) + EPSILON * k.shape[-1]).rsqrt()


def _marks(bucket: Int[Tensor, "r b h l"], ways: tuple[BucketChunks, ...], size: int) -> Int[Tensor, "b h r l"]:
    """What is kept of tokens whose chunks begin with their bucket."""
    rank = torch.stack([_by_head(way.rank, bucket) for way in ways])
    return (bucket.long() * WIDE + rank // size).movedim(0, 2)


def _by_head(x: Int[Tensor, " n"], bucket: Int[Tensor, "r b h l"]) -> Int[Tensor, "b h l"]:
    """What is known of tokens whose heads stand side by side."""
    _, batch, heads, length = bucket.shape
    return x.view(batch, length, heads).transpose(1, 2)


def _next(
    before: LSHState, bucket: Int[Tensor, "r b h l"], key_positions: TokenPositions, size: int
) -> Int[Tensor, "b h r s"]:
    """What is known after some more tokens: each comes after the earlier ones of its bucket in its document."""
    assert before.mark is not None
    fresh = bucket.long().movedim(0, 2)
    every = torch.cat([before.mark // WIDE, fresh], -1)
    rank = cluster_attention.ranks(key_positions.segment_ids[:, None, None] * ROOM + every, fresh.shape[-1])
    return torch.cat([before.mark, fresh * WIDE + rank // size], -1)
