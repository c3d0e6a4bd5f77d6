"""Softmax attention among tokens of neighbouring chunks, over several rounds of chunking, with its own gradient.

A token attends to the union over rounds: a pair that occurs in several rounds counts in the first alone, which equals
dividing its weight by the number of occurrences (Kitaev et al. 2020, section 2, "multi-round LSH attention"). Rounds
are then disjoint sets of keys: outputs are merged by their log-sum-exps, and the gradient of each is taken with the
merged output (Dao et al. 2022, arXiv:2205.14135, appendix B.4). Weights are saved for the gradient where they are few.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from manyformer.nn.clustered.bucket_chunks import BucketChunks
from manyformer.nn.ops import attention_with_lse, tile_softmax
from manyformer.nn.ops.tile_softmax import MAX_SAVED_WEIGHTS, OutputGradient, TileCall
from manyformer.nn.runtime.device_reads import ScratchBuffer
from manyformer.nn.runtime.handwritten_gradient import HandwrittenGradient
from manyformer.nn.runtime.torch_internals import autocast_disabled

PAIRS_PER_CALL = {"cpu": 1 << 18}
"""Token pairs per call on a CPU: as many as fit its caches."""

PAIRS_PER_CALL_ELSEWHERE = 1 << 26
"""Token pairs per call on other devices, which need more parallel work."""

MASK_BIAS = -1e30
"""Added to the score of a pair for each reason to exclude it: finite, so that no result is nan."""

EMPTY_KEY_MARK = -(1 << 22)
"""The mark of an empty slot as key, far from that of an empty query and from the marks of all tokens."""

EMPTY_QUERY_MARK = -(1 << 21)
"""The mark of an empty slot as query."""

BUCKET_ID_BITS = (1 << 20) - 1
"""The low bits of a bucket id, which distinguish neighbouring buckets and fit the 24-bit precision of float32."""


class ChunkVisibility(NamedTuple):
    """Rounds of chunked tokens, with the numbers of chunks to look back and ahead.

    A token attends to earlier tokens of its bucket if `causal`, else to all others; to itself only where there are
    none.
    """

    rounds: tuple[BucketChunks, ...]
    lookback: int
    lookahead: int
    causal: bool

    @property
    def window_chunks(self) -> int:
        """Number of key chunks per query chunk."""
        return self.lookback + 1 + self.lookahead

    @property
    def num_pairs(self) -> int:
        """Number of (query slot, key slot) pairs over all rounds."""
        return sum(chunks.tokens.numel() * self.window_chunks * chunks.tokens.shape[1] for chunks in self.rounds)


def chunk_gather_attention(
    q: Float[Tensor, "n e"],
    k: Float[Tensor, "n e"],
    v: Float[Tensor, "n f"],
    visibility: ChunkVisibility,
    *,
    scale: float,
) -> Float[Tensor, "n f"]:
    """Outputs for the concatenated tokens of all rows, in float32 at least; those of padding are undefined."""
    dtype = v.dtype
    compute_dtype = torch.promote_types(v.dtype, torch.float32)
    y: Tensor = _ChunkGatherAttention.call(*(x.to(compute_dtype) for x in (q, k, v)), visibility, scale)
    return y.to(dtype)


class SavedRounds(NamedTuple):
    """Tensors saved for the gradient: slotted queries, keys and values per round, and weights per call."""

    slots: list[Tensor]
    weights: list[Tensor]


class _ChunkGatherAttention(HandwrittenGradient):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, visibility: ChunkVisibility, scale: float) -> Tensor:
        saves_weights = any(ctx.needs_input_grad) and visibility.num_pairs <= MAX_SAVED_WEIGHTS
        runner = _RoundRunner(q, k, v, visibility, scale, SavedRounds([], []) if saves_weights else None)
        with autocast_disabled(q.device):
            # lazily: a round's slots are freed before those of the next one are made
            results = (runner.forward(round_index) for round_index in runner.round_indices)
            y, lse = next(results, (torch.zeros_like(v), q.new_full(q.shape[:1], -torch.inf)))
            round_lses = [lse.clone()]
            for round_y, round_lse in results:
                attention_with_lse.merge_lse(y, lse, round_y, round_lse)
                round_lses.append(round_lse)
        # a token without another one in reach sees itself: its output is its own value
        isolated = lse == -torch.inf
        torch.where(isolated[:, None], v, y, out=y)
        slots, saved_weights = ([], []) if runner.saved is None else runner.saved
        ctx.save_for_backward(q, k, v, y, lse, isolated, *round_lses, *slots, *saved_weights)
        ctx.visibility = visibility
        ctx.scale = scale
        ctx.cuts = (len(round_lses), len(round_lses) + len(slots))
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, lse, isolated, *saved = ctx.saved_tensors
        round_lses = saved[: ctx.cuts[0]]
        slots = saved[ctx.cuts[0] : ctx.cuts[1]]
        saved_weights = saved[ctx.cuts[1] :]
        saved_rounds = None
        if slots:
            saved_rounds = SavedRounds(slots[::-1], saved_weights[::-1])
        runner = _RoundRunner(q, k, v, ctx.visibility, ctx.scale, saved_rounds)
        # a token that attends only to itself has no weight in any round
        delta = (grad_y * y).sum(-1)
        lse = lse.masked_fill(isolated, torch.inf)
        grads: list[Tensor] = []
        with autocast_disabled(q.device):
            for round_index, round_lse in zip(runner.round_indices, round_lses):
                round_grads = runner.backward(round_index, grad_y, delta, (round_lse - lse).exp_())
                if grads:
                    grads = [total.add_(grad) for total, grad in zip(grads, round_grads)]
                else:
                    grads = round_grads
        grads = grads or [torch.zeros_like(x) for x in (q, k, v)]
        grads[2].addcmul_(grad_y, isolated[:, None].to(grad_y.dtype))
        return *grads, None, None

    @classmethod
    def plain(cls, *arguments: Any) -> Any:
        q, k, v, visibility, scale = arguments
        runner = _RoundRunner(q, k, v, visibility, scale, None)
        with autocast_disabled(q.device):
            rounds = [runner.plain(round_index) for round_index in runner.round_indices]
        if not rounds:
            return v
        lses = torch.stack([lse for _, lse in rounds])
        # a token without another one in reach sees itself
        isolated = (lses == -torch.inf).all(0)
        shares = lses.masked_fill(isolated, 0.0).softmax(0)
        y = (torch.stack([round_y for round_y, _ in rounds]) * shares[..., None]).sum(0)
        return torch.where(isolated[:, None], v, y)


class _RoundRunner:
    """Runs the rounds, forward or backward; the forward pass fills `saved`, the backward pass pops from it."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, visibility: ChunkVisibility, scale: float, saved: SavedRounds | None
    ) -> None:
        self.q = q
        self.k = k
        self.v = v
        self.visibility = visibility
        self.scale = scale
        self.saved = saved
        self.round_indices = [index for index, chunks in enumerate(visibility.rounds) if chunks.tokens.shape[0]]
        self.scratch = ScratchBuffer(q)

    def forward(self, round_index: int) -> tuple[Float[Tensor, "n f"], Float[Tensor, " n"]]:
        """Outputs and log-sum-exps over the pairs whose first occurrence is in this round."""
        chunks = self.visibility.rounds[round_index]
        slots = self._fill_slots(round_index)
        q, k, v = self._gather_windows(slots)
        if self.saved is not None:
            self.saved.slots.extend(slots)
        # one more slot than there are, for padding
        y, lse = (v.new_empty(chunks.tokens.numel() + 1, *extra_shape) for extra_shape in (v.shape[-1:], ()))
        y[-1].zero_()
        lse[-1].fill_(-torch.inf)
        outputs = y[:-1].view(*chunks.tokens.shape, -1)
        slot_lse = lse[:-1].view(chunks.tokens.shape)
        mask_bias = _RoundMaskBias(self.visibility, round_index, q)
        for chunk_slice in self._chunk_slices(chunks):
            call = TileCall(q[chunk_slice], k[chunk_slice], v[chunk_slice], mask_bias(chunk_slice, self.scratch), None)
            if self.saved is None:
                tile_weights = self.scratch("weights", *call.shape)
            else:
                tile_weights = q.new_empty(call.shape)
            scores = self.scratch("scores", *call.shape)
            tile_softmax.compute_weights(call, self.scale, scores, tile_weights)
            torch.bmm(tile_weights, call.v, out=outputs[chunk_slice])
            slot_lse[chunk_slice] = tile_softmax.log_sum_exps(call, scores, tile_weights)
            if self.saved is not None:
                self.saved.weights.append(tile_weights)
        # where all pairs are excluded, finite penalties leave a softmax of garbage: its sum says so
        lse.masked_fill_(lse < MASK_BIAS / 2, -torch.inf)
        return y.index_select(0, chunks.slot), lse.index_select(0, chunks.slot)

    def plain(self, round_index: int) -> tuple[Float[Tensor, "n f"], Float[Tensor, " n"]]:
        """`forward` in operations that torch can differentiate, all chunks at once."""
        chunks = self.visibility.rounds[round_index]
        q, k, v = self._gather_windows(self._fill_slots(round_index))
        scores = q @ k.mT * self.scale + _RoundMaskBias(self.visibility, round_index, q).of_all_chunks()
        # one more slot than there are, for padding
        y = F.pad((scores.softmax(-1) @ v).flatten(0, 1), (0, 0, 0, 1))
        lse = F.pad(scores.logsumexp(-1).flatten(), (0, 1), value=-torch.inf)
        lse = lse.masked_fill(lse < MASK_BIAS / 2, -torch.inf)
        return y.index_select(0, chunks.slot), lse.index_select(0, chunks.slot)

    def backward(self, round_index: int, grad_y: Tensor, delta: Tensor, share: Tensor) -> list[Tensor]:
        """Gradients of q, k and v from the pairs of this round."""
        chunks = self.visibility.rounds[round_index]
        lookback = self.visibility.lookback
        if self.saved is None:
            slots = self._fill_slots(round_index)
        else:
            slots = [self.saved.slots.pop() for _ in range(3)]
        q, k, v = self._gather_windows(slots)
        # an empty slot holds a copy of the first token and must not contribute a gradient
        shares = _gather_slots(share, chunks.tokens).masked_fill_(chunks.tokens < 0, 0.0)
        slot_grad_y = _gather_slots(grad_y, chunks.tokens).mul_(shares[..., None])
        slot_delta = _gather_slots(delta, chunks.tokens).mul_(shares)[..., None]
        # extra chunks on both sides, and one for padding's slot
        count, size = chunks.tokens.shape
        # window w of keys begins w chunks into the frame: gradients of keys are added at the same places
        num_framed = lookback + count + max(self.visibility.lookahead, 1)
        totals = [x.new_empty(num_framed, size, x.shape[-1]) for x in (q, k, v)]
        for total in totals:
            # chunks that are no window's last chunk
            total[: self.visibility.window_chunks - 1] = 0.0
            total[lookback + count :] = 0.0
        mask_bias = None
        if self.saved is None:
            mask_bias = _RoundMaskBias(self.visibility, round_index, q)
        for chunk_slice in self._chunk_slices(chunks):
            bias = None
            if mask_bias is not None:
                bias = mask_bias(chunk_slice, self.scratch)
            call = TileCall(q[chunk_slice], k[chunk_slice], v[chunk_slice], bias, None)
            if self.saved is None:
                tile_weights = tile_softmax.recompute_weights(call, self.scale, self.scratch)
            else:
                tile_weights = self.saved.weights.pop()
            grad_q = totals[0][chunk_slice.start + lookback : chunk_slice.stop + lookback]
            grads_kv = [self.scratch(name, *x.shape) for name, x in (("to_k", call.k), ("to_v", call.v))]
            output_gradient = OutputGradient(slot_grad_y[chunk_slice], slot_delta[chunk_slice])
            tile_softmax.compute_gradients(
                call, tile_weights, output_gradient, self.scratch, self.scale, [grad_q, *grads_kv]
            )
            for total, grad_kv in zip(totals[1:], grads_kv):
                *earlier, last = grad_kv.view(len(grad_kv), self.visibility.window_chunks, size, -1).unbind(1)
                # the first contribution to these chunks: assigned, not added
                total[chunk_slice.start + len(earlier) : chunk_slice.stop + len(earlier)] = last
                for shift, chunk_grad in enumerate(earlier):
                    total[chunk_slice.start + shift : chunk_slice.stop + shift] += chunk_grad
        slot = chunks.slot + lookback * size
        return [total.flatten(0, 1).index_select(0, slot) for total in totals]

    def _fill_slots(self, round_index: int) -> list[Float[Tensor, "c m e"]]:
        """Queries in slots, and keys and values in slots with empty chunks at both ends."""
        chunks = self.visibility.rounds[round_index]
        framed = _pad_chunks(chunks, self.visibility)
        keys = _gather_slots(self.k, framed)
        values = _gather_slots(self.v, framed)
        # shared queries and keys are gathered already
        lookback = self.visibility.lookback
        if self.q is self.k:
            q = keys[lookback : lookback + chunks.tokens.shape[0]]
        else:
            q = _gather_slots(self.q, chunks.tokens)
        return [q, keys, values]

    def _gather_windows(
        self, slots: list[Tensor]
    ) -> tuple[Float[Tensor, "c m e"], Float[Tensor, "c s e"], Float[Tensor, "c s f"]]:
        """Queries, and the keys and values in the window of each chunk."""
        q, keys, values = slots
        return q, _window_view(keys, self.visibility), _window_view(values, self.visibility)

    def _chunk_slices(self, chunks: BucketChunks) -> Iterator[slice]:
        """Slices of chunks, each for one call."""
        count, size = chunks.tokens.shape
        threads = torch.get_num_threads()
        if self.q.device.type == "cpu":
            max_pairs = PAIRS_PER_CALL["cpu"] * threads
        else:
            max_pairs = PAIRS_PER_CALL_ELSEWHERE
        step = max(max_pairs // (size * size * self.visibility.window_chunks), 1)
        return (slice(begin, min(begin + step, count)) for begin in range(0, count, step))


class _RoundMaskBias:
    """Additive mask of a round: excluded pairs, among them those already scored in an earlier round.

    Bucket ids and marks are compared as floats because CPU comparison kernels write floats several times faster than
    booleans.
    """

    def __init__(self, visibility: ChunkVisibility, round_index: int, like: Tensor) -> None:
        self._visibility = visibility
        self._chunks = visibility.rounds[round_index]
        # adjacent buckets of sorted tokens differ in the low bits
        bucket = (self._chunks.bucket & BUCKET_ID_BITS).to(like.dtype)
        self._bucket = self._values_of_slots(bucket, bucket)
        # twice the marks, so that lookback and lookahead become one symmetric distance
        marks = [2 * past.mark.to(like.dtype) for past in visibility.rounds[:round_index]]
        offset = visibility.lookback - visibility.lookahead
        self._earlier = [self._values_of_slots(mark - offset, mark) for mark in marks]
        excluded = _self_or_future(visibility, self._chunks.tokens.shape[1], like.device)
        self._excluded = excluded.to(like.dtype) * MASK_BIAS

    def __call__(self, chunk_slice: slice, scratch: ScratchBuffer) -> Float[Tensor, "p m s"]:
        """The additive mask for some chunks; valid until the next call."""
        shape = (chunk_slice.stop - chunk_slice.start, *self._excluded.shape)
        bias = scratch("bias", *shape)
        comparison = scratch("other", *shape)
        query_values, key_values = self._bucket
        torch.ne(query_values[chunk_slice, :, None], key_values[chunk_slice, None], out=comparison)
        torch.add(self._excluded, comparison, alpha=MASK_BIAS, out=bias)
        for query_values, key_values in self._earlier:
            torch.sub(query_values[chunk_slice, :, None], key_values[chunk_slice, None], out=comparison)
            bias.add_(comparison.abs_().le_(self._visibility.lookback + self._visibility.lookahead), alpha=MASK_BIAS)
        return bias

    def of_all_chunks(self) -> Float[Tensor, "c m s"]:
        """The additive mask of all chunks, in operations without buffers."""
        query_values, key_values = self._bucket
        excluded = (query_values[:, :, None] != key_values[:, None]).to(self._excluded.dtype)
        bias = self._excluded + excluded * MASK_BIAS
        reach = self._visibility.lookback + self._visibility.lookahead
        for query_values, key_values in self._earlier:
            is_scored = (query_values[:, :, None] - key_values[:, None]).abs() <= reach
            bias = bias + is_scored.to(bias.dtype) * MASK_BIAS
        return bias

    def _values_of_slots(
        self, query_values: Float[Tensor, " n"], key_values: Float[Tensor, " n"]
    ) -> tuple[Float[Tensor, "c m"], Float[Tensor, "c s"]]:
        """A value per token for query slots and for key windows; empty slots get values far from all others."""
        framed = _pad_chunks(self._chunks, self._visibility)
        queries = _gather_slots(query_values, self._chunks.tokens)
        keys = _gather_slots(key_values, framed)
        # far from the marks of all tokens and from each other, so that empty slots never meet
        queries.masked_fill_(self._chunks.tokens < 0, EMPTY_QUERY_MARK)
        return queries, _window_view(keys.masked_fill_(framed < 0, EMPTY_KEY_MARK), self._visibility)


def _gather_slots(x: Shaped[Tensor, "n *e"], tokens: Int[Tensor, "c m"]) -> Shaped[Tensor, "c m *e"]:
    """Tokens gathered into slots; the contents of empty slots are undefined."""
    return x.index_select(0, tokens.flatten().clamp(min=0)).view(*tokens.shape, *x.shape[1:])


def _pad_chunks(chunks: BucketChunks, visibility: ChunkVisibility) -> Int[Tensor, "k m"]:
    """Token indices of the chunks, with empty chunks before the first and after the last one."""
    return F.pad(chunks.tokens, [0, 0, visibility.lookback, visibility.lookahead], value=-1)


def _window_view(x: Shaped[Tensor, "k m *e"], visibility: ChunkVisibility) -> Shaped[Tensor, "c s *e"]:
    """The window of each chunk, as overlapping views of the padded chunks."""
    # a window is a run of adjacent chunks: consecutive windows overlap in memory, nothing is copied
    count = x.shape[0] - visibility.window_chunks + 1
    width = visibility.window_chunks * x.shape[1]
    return x.as_strided((count, width, *x.shape[2:]), x.stride())


def _self_or_future(visibility: ChunkVisibility, size: int, device: torch.device) -> Bool[Tensor, "m s"]:
    """Excluded slot pairs: a slot itself and, if causal, later slots; a bucket's tokens are in document order."""
    query_slots = torch.arange(size, device=device)[:, None] + visibility.lookback * size
    key_slots = torch.arange(visibility.window_chunks * size, device=device)
    if visibility.causal:
        return key_slots >= query_slots
    return key_slots == query_slots
