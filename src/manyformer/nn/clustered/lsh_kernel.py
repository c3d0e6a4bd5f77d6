"""LSH attention: tokens attend to tokens of similar direction, selected by locality-sensitive hashing."""

from typing import Literal, NamedTuple, final, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.nn.clustered import bucket_chunks, chunk_gather_attention, lsh_hashing
from manyformer.nn.clustered.bucket_chunks import MAX_BUCKETS, BucketChunks, ChunkUnit
from manyformer.nn.clustered.chunk_gather_attention import ChunkVisibility
from manyformer.nn.core import LayerOutput, State, TokenPositions, no_watch
from manyformer.nn.kernels.kernel import Kernel, KernelCall
from manyformer.nn.runtime.head_selection import HeadSelection, PerHeadTensors
from manyformer.nn.runtime.recompute import choose_once
from manyformer.nn.runtime.torch_internals import autocast_disabled, compiler_disabled
from manyformer.nn.runtime.training_hooks import PostStepUpdate

LSHVariant = Literal["strict", "published"]
LSHPath = Literal["naive", "sorted", "remembered"]

EPSILON = 1e-6
"""Added to the mean square of a key, as in the released code."""

CHUNKS_PER_BUCKET = 1 << 32
"""A chunk id is the bucket times this number, plus the index of the chunk within the bucket."""


class LSHState(NamedTuple):
    """The chunk id (see `CHUNKS_PER_BUCKET`) of each token so far, in each hash round; None before any token."""

    chunk_ids: Int[Tensor, "b h r s"] | None = None


@final
class LSHKernel(Kernel, PerHeadTensors, PostStepUpdate):
    """Locality-sensitive hashing self-attention (Kitaev et al. 2020, section 2).

    The queries of tokens are their keys, and keys are normalized to length 1. In each of `num_hashes` rounds random
    rotations assign every token to one of `num_buckets`; tokens are sorted by bucket and position and cut into chunks
    of `chunk_length`. A token attends to the tokens of its bucket in its own chunk, `chunks_before` chunks before it
    and `chunks_after` after it, and to itself only where it sees no other token. A pair that meets in several rounds
    counts once. With `chunks_after` a token also sees later tokens of its document.

    The variant "published" sorts whole documents, so chunk borders, and thereby outputs, depend on later tokens; a
    document of at most `chunk_length` tokens gets full attention. In the variant "strict" each bucket begins a new
    chunk, so that a token depends on earlier tokens alone and decoding can continue from a state.

    Scores are multiplied by `scale`, as published 1: the length of a query alone determines how peaked its weights
    are. Tasks whose keys must first become similar need a smaller scale at the beginning (see `reformer`).

    Rotations follow from the buffers `seed` and `number`; with `redraw` they are redrawn every `redraw` training steps.
    `num_hashes` is no parameter and may be set at any time; the first rounds stay the same. `path` forces a path:
    "naive" (all pairs, also used when weights are watched) or "sorted". Raises ValueError for unsupported calls.
    """

    supports = frozenset({"query", "key"})
    tied_qk = True
    content_based = True
    seed: Tensor
    number: Tensor

    def __init__(
        self,
        *,
        num_buckets: int,
        chunk_length: int,
        num_hashes: int,
        chunks_before: int = 1,
        chunks_after: int = 0,
        variant: LSHVariant = "strict",
        redraw: int | None = 1,
        scale: float = 1.0,
        path: Literal["auto", "naive", "sorted"] = "auto",
    ) -> None:
        super().__init__()
        for name, value in (("chunk_length", chunk_length), ("num_hashes", num_hashes), ("redraw", redraw)):
            if value is not None and value < 1:
                raise ValueError(f"LSHKernel: {name} ({value}) must be at least 1")
        if not scale > 0:
            raise ValueError(f"LSHKernel: scale ({scale}) must be above 0")
        if min(chunks_before, chunks_after) < 0:
            raise ValueError(
                f"LSHKernel: chunks_before ({chunks_before}) and chunks_after ({chunks_after}) must be at least 0"
            )
        if variant not in get_args(LSHVariant):
            raise ValueError(f"LSHKernel: variant '{variant}' must be one of {', '.join(get_args(LSHVariant))}")
        if variant == "strict" and chunks_after:
            raise ValueError(
                f"LSHKernel: chunks_after ({chunks_after}) must be 0 in the variant 'strict', which is causal"
            )
        self.factors = lsh_hashing.bucket_factors(num_buckets)
        self.num_buckets = num_buckets
        self.chunk_length = chunk_length
        self.num_hashes = num_hashes
        self.chunks_before = chunks_before
        self.chunks_after = chunks_after
        self.variant = variant
        self.redraw = redraw
        self.scale = scale
        self.path = path
        # drawn on the CPU, so that it is the same on every device for one seed of torch
        seed = torch.empty((), dtype=torch.long, device="cpu").random_(2**40)
        self.register_buffer("seed", seed.to(torch.empty(0).device))
        self.register_buffer("number", torch.zeros((), dtype=torch.long))
        self._drawn_heads: tuple[tuple[int, ...], int] | None = None

    def after_step(self, step: int) -> None:
        if self.redraw is not None:
            # by the step, not by a counter of calls: evaluating in between, or resuming, draws the same rotations
            self.number.fill_(step // self.redraw)

    def keep_heads(self, selection: HeadSelection) -> None:
        numbers, drawn = self._drawn_heads or (range(selection.total), selection.total)
        # rotations of all heads are drawn together, and those that remain must stay the same
        self._drawn_heads = tuple(numbers[head] for head in selection.heads), drawn

    def init_state(self, batch: int, *, device: torch.device, dtype: torch.dtype) -> State:
        return LSHState()

    def forward(self, call: KernelCall) -> LayerOutput:
        path, _ = self._select_path(call)
        with autocast_disabled(call.q.device):
            keys = normalize_keys(call.k).to(call.v.dtype)
        output: LayerOutput = self._attend(call._replace(q=call.q.to(call.v.dtype), k=keys), path)
        return output

    def explain(self, call: KernelCall) -> str:
        return ": ".join(self._select_path(call))

    def extra_repr(self) -> str:
        sizes = f"{self.num_hashes} rounds, {self.num_buckets} buckets, chunks of {self.chunk_length}"
        chunks = f"chunks_before={self.chunks_before}, chunks_after={self.chunks_after}"
        return f"{sizes}, {chunks}, {self.variant}, redraw={self.redraw}, scale={self.scale}"

    def _select_path(self, call: KernelCall) -> tuple[LSHPath, str]:
        """The path of this call and the reason for it."""
        queries = call.q.shape[2]
        keys = call.k.shape[2]
        state = call.state
        if state is not None and self.variant != "strict":
            raise ValueError(
                f"LSHKernel: the variant '{self.variant}' cannot continue from a state, because later tokens move its "
                "chunk borders; variant='strict' can"
            )
        if state is not None and state.chunk_ids is not None:
            return "remembered", "the buckets of earlier tokens are in the state"
        if queries != keys:
            raise ValueError(f"LSHKernel ties queries and keys: got {queries} queries and {keys} keys")
        if self.path != "auto":
            return self.path, "forced"
        if call.watch is not no_watch:
            return "naive", "the weights are watched, and only this path forms them"
        sizes = f"{self.num_hashes} rounds of {self.num_buckets} buckets in chunks of {self.chunk_length}"
        return "sorted", sizes

    # sorting and cutting depend on tensor values, which a compiled graph cannot follow
    @compiler_disabled
    def _attend(self, call: KernelCall, path: LSHPath) -> LayerOutput:
        q, k, v, query_positions, key_positions, _, state, watch = call
        # stored for recomputation: rounding that differs in the second forward pass must not move a token to another
        # bucket
        buckets = choose_once(lambda: self._hash(q))
        if self.variant == "published":
            # one bucket for a document that fits a chunk: full attention, as published
            is_short = bucket_chunks.document_lengths(key_positions.segment_ids) <= self.chunk_length
            buckets = buckets.masked_fill(is_short[:, None], 0)
        if path == "remembered":
            assert state is not None
            chunk_ids = _append_chunk_ids(state, buckets, key_positions, self.chunk_length)
            mask = self._visible_keys(chunk_ids[..., -q.shape[2] :], chunk_ids, query_positions, key_positions)
            return LayerOutput(call.softmax_reference(mask, scale=self.scale)[0], LSHState(chunk_ids))
        chunks_per_round = tuple(self._sort_into_chunks(key_positions, round_buckets) for round_buckets in buckets)
        new_state = None
        if state is not None:
            new_state = LSHState(_pack_chunk_ids(buckets, chunks_per_round, self.chunk_length))
        if path == "sorted":
            return LayerOutput(self._attend_sorted(q, k, v, chunks_per_round), new_state)
        all_chunk_ids = torch.stack([_by_head(chunks.mark, buckets) for chunks in chunks_per_round], 2)
        mask = self._visible_keys(all_chunk_ids, all_chunk_ids, query_positions, key_positions)
        y, weights = call.softmax_reference(mask, scale=self.scale)
        watch(self, "weights", weights)
        return LayerOutput(y, new_state)

    @torch.no_grad()
    def _hash(self, q: Float[Tensor, "b h l e"]) -> Int[Tensor, "r b h l"]:
        """The buckets of all tokens in all hash rounds."""
        with autocast_disabled(q.device):
            vectors = q.to(torch.promote_types(q.dtype, torch.float32))
            seed = self.seed + lsh_hashing.splitmix64(self.number)
            heads, drawn = self._drawn_heads or (range(q.shape[1]), q.shape[1])
            rotations = lsh_hashing.rotations(seed, self.num_hashes, drawn, q.shape[3], self.factors)
            if drawn > len(heads):
                rotations = tuple(directions[:, heads] for directions in rotations)
            buckets = lsh_hashing.buckets(vectors, rotations)
        # int32, because the choice is stored for recomputation
        if buckets is None:
            return q.new_zeros(self.num_hashes, *q.shape[:3], dtype=torch.int32)
        return buckets.int()

    def _sort_into_chunks(self, key_positions: TokenPositions, buckets: Int[Tensor, "b h l"]) -> BucketChunks:
        """Sort the tokens of one hash round into chunks, all heads of all rows one after the other."""
        segment_ids = key_positions.segment_ids[:, None].expand(buckets.shape).flatten(0, 1)
        flat_buckets = buckets.flatten(0, 1)
        unit: ChunkUnit = "bucket" if self.variant == "strict" else "document"
        return bucket_chunks.sort_into_chunks(
            flat_buckets,
            segment_ids,
            self.chunk_length,
            unit=unit,
            reach=self.chunks_before + self.chunks_after,
            interleaved_heads=buckets.shape[1],
            max_units=bucket_chunks.units_per_row(key_positions, unit, self.num_buckets),
        )

    def _attend_sorted(self, q: Tensor, k: Tensor, v: Tensor, chunks_per_round: tuple[BucketChunks, ...]) -> Tensor:
        causal = not self.chunks_after
        visibility = ChunkVisibility(chunks_per_round, self.chunks_before, self.chunks_after, causal=causal)
        # views where the heads of a token are adjacent in memory
        queries, keys, values = (x.transpose(1, 2).flatten(0, 2) for x in (q, k, v))
        y = chunk_gather_attention.chunk_gather_attention(queries, keys, values, visibility, scale=self.scale)
        return y.view(q.shape[0], q.shape[2], q.shape[1], -1).transpose(1, 2)

    def _visible_keys(
        self,
        query_chunks: Int[Tensor, "b h r l"],
        key_chunks: Int[Tensor, "b h r s"],
        query_positions: TokenPositions,
        key_positions: TokenPositions,
    ) -> Bool[Tensor, "b h l s"]:
        """The keys that each query attends to: those that share a chunk with it in any round, or itself alone."""
        query_ids = query_positions.position_ids[:, None, :, None]
        key_ids = key_positions.position_ids[:, None, None]
        same_segment = query_positions.same_document(key_positions)[:, None]
        # never the token itself: its own key is the most similar to its query
        allowed = same_segment & (query_ids != key_ids if self.chunks_after else query_ids > key_ids)
        in_shared_round = torch.zeros_like(allowed)
        for hash_round in range(query_chunks.shape[2]):
            round_chunks = query_chunks[:, :, hash_round, :, None], key_chunks[:, :, hash_round, None]
            shares = bucket_chunks.same_or_adjacent(*round_chunks, self.chunks_before, self.chunks_after)
            in_shared_round = in_shared_round | shares
        return bucket_chunks.fall_back_to_self(in_shared_round & allowed, same_segment & (query_ids == key_ids))


def normalize_keys(k: Float[Tensor, "b h s e"]) -> Float[Tensor, "b h s e"]:
    """Normalize keys to length 1, in float32 at least; `EPSILON` is that of the released code."""
    keys = k.to(torch.promote_types(k.dtype, torch.float32))
    return keys * (keys.square().sum(-1, keepdim=True) + EPSILON * k.shape[-1]).rsqrt()


def _pack_chunk_ids(
    buckets: Int[Tensor, "r b h l"], chunks_per_round: tuple[BucketChunks, ...], chunk_length: int
) -> Int[Tensor, "b h r l"]:
    """The chunk ids of tokens, in the variant in which each bucket begins a chunk."""
    ranks = torch.stack([_by_head(chunks.rank, buckets) for chunks in chunks_per_round])
    return (buckets.long() * CHUNKS_PER_BUCKET + ranks // chunk_length).movedim(0, 2)


def _by_head(x: Int[Tensor, " n"], buckets: Int[Tensor, "r b h l"]) -> Int[Tensor, "b h l"]:
    """Reshape values of tokens whose heads are adjacent to (b, h, l)."""
    _, batch, heads, length = buckets.shape
    return x.view(batch, length, heads).transpose(1, 2)


def _append_chunk_ids(
    state: LSHState, buckets: Int[Tensor, "r b h l"], key_positions: TokenPositions, chunk_length: int
) -> Int[Tensor, "b h r s"]:
    """Append the chunk ids of new tokens; each comes after the earlier tokens of its bucket and document."""
    assert state.chunk_ids is not None
    new_buckets = buckets.long().movedim(0, 2)
    all_buckets = torch.cat([state.chunk_ids // CHUNKS_PER_BUCKET, new_buckets], -1)
    # the rank of a new token counts all earlier ones of its bucket, so all of them are compared
    unit_ids = key_positions.segment_ids[:, None, None] * MAX_BUCKETS + all_buckets
    ranks = bucket_chunks.ranks(unit_ids, new_buckets.shape[-1])
    return torch.cat([state.chunk_ids, new_buckets * CHUNKS_PER_BUCKET + ranks // chunk_length], -1)
