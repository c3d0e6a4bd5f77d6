"""Memorizing attention: local attention plus kNN lookup in a large memory of earlier keys without gradients."""

from abc import ABC, abstractmethod
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from manyformer.base.errors import UserError
from manyformer.nn.core import PADDING_SEGMENT, LayerOutput, State, TokenPositions, ValueRecorder, no_watch
from manyformer.nn.kernels.kernel import Kernel, KernelCall
from manyformer.nn.ops.softmax_attention import masked_softmax, region_shares
from manyformer.nn.ops.top_products import TopProducts, top_products
from manyformer.nn.runtime.head_selection import PerHeadTensors
from manyformer.nn.runtime.training_hooks import StatefulAcrossBatches
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.nn.sparse.kv_buffer import BlockHistory, KVBuffer, append, empty_buffer, shared_key_ranges, trim


class KeySearch(ABC):
    """Finds the keys with the largest dot product for each query."""

    name: str

    @abstractmethod
    def __call__(
        self, q: Float[Tensor, "p l e"], k: Float[Tensor, "p s e"], count: int, masked: Bool[Tensor, "l s"] | None
    ) -> TopProducts:
        """Return the `count` largest products, or all if there are fewer; `masked` pairs have the product -inf."""


@final
class ExactSearch(KeySearch):
    """Computes all products in torch, on any device: see `manyformer.nn.ops.top_products`."""

    name = "torch"

    def __call__(
        self, q: Float[Tensor, "p l e"], k: Float[Tensor, "p s e"], count: int, masked: Bool[Tensor, "l s"] | None
    ) -> TopProducts:
        return top_products(q, k, count, masked)


@final
class FaissSearch(KeySearch):
    """faiss's exhaustive search by inner product, in float32 on a CPU; it needs `pip install 'manyformer[knn]'`.

    It builds no index, because the memory changes with every segment. faiss cannot mask single keys, as rows with
    padding need; those calls are computed in torch. Raises UserError if faiss is not installed.
    """

    name = "faiss"

    def __init__(self) -> None:
        try:
            import faiss
        except ImportError as error:
            raise UserError("search 'faiss' needs faiss: pip install 'manyformer[knn]'") from error
        self._faiss = faiss

    def __call__(
        self, q: Float[Tensor, "p l e"], k: Float[Tensor, "p s e"], count: int, masked: Bool[Tensor, "l s"] | None
    ) -> TopProducts:
        if masked is not None or not k.shape[1] or not q.shape[1]:
            return top_products(q, k, count, masked)
        products = []
        columns = []
        for queries, keys in zip(*(x.detach().float().cpu().contiguous().numpy() for x in (q, k))):
            nearest = self._faiss.knn(queries, keys, min(count, len(keys)), metric=self._faiss.METRIC_INNER_PRODUCT)
            products.append(torch.from_numpy(nearest[0]))
            columns.append(torch.from_numpy(nearest[1]))
        return TopProducts(torch.stack(products).to(q), torch.stack(columns).to(q.device))


class LocalAttentionCall(NamedTuple):
    """The call of the local attention kernel."""

    inner: SoftmaxKernel
    call: KernelCall

    @property
    def scale(self) -> float:
        """The factor of the dot products."""
        return self.call.q.shape[-1] ** -0.5 if self.inner.scale is None else self.inner.scale

    def local_output(self) -> Float[Tensor, "b h l f"]:
        """Compute the output of local attention."""
        return self.inner(self.call).y


class RetrievedPairs(NamedTuple):
    """The memory pairs retrieved for each query: scores, values, which of them are visible, and their positions."""

    scores: Float[Tensor, "b h l n"]
    v: Float[Tensor, "b h l n f"]
    visible: Bool[Tensor, "b h l n"]
    position_ids: Int[Tensor, "b h l n"]


class CombinedOutput(NamedTuple):
    """Outputs, and the share of each that comes from the memory; None means 0."""

    y: Float[Tensor, "b h l f"]
    memory_share: Float[Tensor, "b h l 1"] | None = None


class MemoryCombiner(nn.Module, ABC):
    """Combines local attention with the retrieved pairs."""

    @abstractmethod
    def forward(self, local: LocalAttentionCall, retrieved: RetrievedPairs | None) -> CombinedOutput:
        """Combine them; `retrieved` is None if no query can see any pair of the memory."""


@final
class GatedCombiner(MemoryCombiner, PerHeadTensors):
    """(1 - g) local + g memory with separate softmaxes and g = sigmoid(bias) for each head (section 3.2).

    g is 0 for a query without a visible pair; the authors' code reads zeros from an empty memory instead.
    """

    head_axes = (("bias", -1),)

    def __init__(self, heads: int, *, bias: float = 0.0) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.full((heads,), bias))

    def forward(self, local: LocalAttentionCall, retrieved: RetrievedPairs | None) -> CombinedOutput:
        y = local.local_output()
        gate = self.bias.to(y.dtype).sigmoid()[:, None, None]
        if retrieved is None:
            # the bias needs a gradient anyway: in distributed training other processes wait for it
            return CombinedOutput(y + 0.0 * gate if torch.is_grad_enabled() else y)
        weights = masked_softmax(retrieved.scores, retrieved.visible).to(y.dtype)
        gate = gate * retrieved.visible.any(-1, keepdim=True)
        return CombinedOutput(y + gate * (_weighted_values(weights, retrieved.v) - y), gate)


@final
class JointSoftmaxCombiner(MemoryCombiner):
    """One softmax over local keys and retrieved keys, as in the first version of the paper (ICLR submission)."""

    def forward(self, local: LocalAttentionCall, retrieved: RetrievedPairs | None) -> CombinedOutput:
        if retrieved is None:
            return CombinedOutput(local.local_output())
        inner, (q, k, v, query_positions, key_positions, position, _, watch) = local
        local_scores = position.score(q @ k.mT * local.scale, q, k, query_positions, key_positions)
        local_mask = inner.mask.dense(query_positions, key_positions, q.shape[1]).expand(local_scores.shape)
        scores = torch.cat([retrieved.scores, local_scores], -1)
        mask = torch.cat([retrieved.visible, local_mask], -1)
        weights = masked_softmax(scores, mask).to(v.dtype)
        memory_weights, local_weights = torch.split(weights, [retrieved.scores.shape[-1], k.shape[2]], -1)
        watch(inner, "weights", local_weights)
        local_y = position.value(local_weights @ v, local_weights, query_positions, key_positions)
        y = local_y + _weighted_values(memory_weights, retrieved.v)
        return CombinedOutput(y, memory_weights.sum(-1, keepdim=True))


@final
class MemorizingKernel(Kernel, PerHeadTensors, StatefulAcrossBatches):
    """Local attention by `inner` plus the nearest of `size` pairs per query and head (Wu et al. 2022, section 3.2).

    Each document of each row has its own memory: its tokens are divided into blocks of `block`, and the tokens of a
    block see the last `size` tokens before the block, however the text is divided into calls (in the paper: before the
    segment). Keys and values are stored as they were computed and get no gradient; queries get one through the
    retrieved pairs. `neighbours` pairs are selected for each query by dot products alone, without positions; positions
    that act on keys are refused. Needs a source that returns the keys of the layer's own input last, such as
    `SelfSource` and `SegmentMemorySource`. The watched value "neighbour_weights" is the softmax over the retrieved
    pairs alone, "neighbour_positions" the positions of their tokens.
    """

    supports = frozenset({"query", "score", "value"})
    regions = ("memory", "lately", "segment")

    def __init__(
        self,
        inner: SoftmaxKernel,
        heads: int,
        head_dim: int,
        *,
        size: int,
        neighbours: int = 32,
        block: int = 512,
        combine: MemoryCombiner | None = None,
        search: KeySearch | None = None,
    ) -> None:
        super().__init__()
        if min(size, neighbours, block) < 1:
            raise ValueError(
                f"MemorizingKernel: size ({size}), neighbours ({neighbours}) and block ({block}) must be at least 1"
            )
        self.inner = inner
        self.heads = heads
        self.head_dim = head_dim
        self.neighbours = neighbours
        self.history = BlockHistory(size, block)
        self.combine = GatedCombiner(heads) if combine is None else combine
        self.search = ExactSearch() if search is None else search

    def init_state(self, batch: int, *, device: torch.device, dtype: torch.dtype) -> State:
        return empty_buffer(batch, self.heads, self.head_dim, self.head_dim, device=device, dtype=dtype)

    def forward(self, call: KernelCall) -> LayerOutput:
        q = call.q
        k = call.k
        v = call.v
        query_positions = call.query_positions
        state = call.state
        num_cached = k.shape[2] - q.shape[2]
        keep = self.history.required_tokens
        position_ids, segment_ids = (x.expand(q.shape[0], -1) for x in query_positions[:2])
        positions = query_positions._replace(position_ids=position_ids, segment_ids=segment_ids)
        # what the local attention has cached was stored when it was new
        new_pairs = k.detach()[:, :, num_cached:], v.detach()[:, :, num_cached:]
        buffer = KVBuffer(*new_pairs, position_ids, segment_ids, 0, q.shape[2])
        if state is not None:
            buffer = append(state, *new_pairs, positions, keep)
        recorder = ValueRecorder(self.inner, "weights", call.watch)
        watch = call.watch if call.watch is no_watch else recorder
        local = LocalAttentionCall(self.inner, call._replace(state=None, watch=watch))
        retrieved = None
        if not self.history.has_no_visible_keys(query_positions):
            retrieved = self._retrieve(q, buffer, positions, local.scale)
        if retrieved is not None and call.watch is not no_watch:
            call.watch(self, "neighbour_positions", retrieved.position_ids)
            call.watch(self, "neighbour_weights", masked_softmax(retrieved.scores, retrieved.visible))
        y, memory_share = self.combine(local, retrieved)
        if recorder.values:
            masses = _region_masses(recorder.values[-1].detach(), memory_share, positions)
            call.watch(self, "mass", masses)
        return LayerOutput(y, None if state is None else trim(buffer, query_positions, keep))

    def explain(self, call: KernelCall) -> str:
        local_path = self.inner.explain(call._replace(state=None))
        state = call.state
        num_pairs = (0 if state is None else state.stop - state.start) + call.q.shape[2]
        has_ranges = shared_key_ranges(self.history, call.query_positions, num_pairs) is not None
        masking = "masked key by key in torch"
        if has_ranges:
            masking = "in contiguous ranges"
        return f"{local_path}; {self.neighbours} of {num_pairs} pairs looked up by {self.search.name}, {masking}"

    def extra_repr(self) -> str:
        size, block = self.history
        return f"size={size}, block={block}, neighbours={self.neighbours}, search={self.search.name}"

    def _retrieve(
        self, q: Tensor, buffer: KVBuffer, query_positions: TokenPositions, scale: float
    ) -> RetrievedPairs | None:
        """Retrieve the nearest visible pairs of each query; None if there are none."""
        used = buffer.used
        nearest = self._search_buffer(q.detach().to(buffer.k.dtype), used, query_positions)
        if nearest is None:
            return None
        # index the buffers of all rows and heads as one table
        offset = torch.arange(q.shape[0] * q.shape[1], device=q.device).view(*q.shape[:2], 1, 1) * buffer.k.shape[2]
        # columns count from the first used one
        index = nearest.columns + (offset + buffer.start)
        k, v = (F.embedding(index, table.reshape(-1, table.shape[-1])).to(q.dtype) for table in (buffer.k, buffer.v))
        rows = torch.arange(q.shape[0], device=q.device)[:, None, None, None]
        position_ids = used.position_ids[rows, nearest.columns]
        return RetrievedPairs((k @ q[..., None])[..., 0] * scale, v, nearest.products > -torch.inf, position_ids)

    def _search_buffer(self, q: Tensor, buffer: KVBuffer, query_positions: TokenPositions) -> TopProducts | None:
        """Search the used columns for the nearest visible keys; None if no query has one."""
        count = min(self.neighbours, buffer.stop)
        if torch.compiler.is_exporting():
            # ranges and rows are loops, whose number a graph would fix
            columns = TokenPositions(buffer.position_ids, buffer.segment_ids)
            hidden = self.history.masked_keys(query_positions, columns)[:, None]
            scores = (q @ buffer.k.mT).masked_fill(hidden, -torch.inf)
            return TopProducts(*scores.topk(count, -1))
        products = q.new_full((*q.shape[:3], count), -torch.inf)
        index = q.new_zeros(products.shape, dtype=torch.long)
        ranges = shared_key_ranges(self.history, query_positions, buffer.stop)
        if ranges is None:
            masked = self.history.masked_keys(query_positions, TokenPositions(buffer.position_ids, buffer.segment_ids))
            for row in range(len(q)):
                products[row], index[row] = self.search(q[row], buffer.k[row], count, masked[row])
            return TopProducts(products, index)
        has_ranges = False
        for rows, queries, keys in ranges:
            has_ranges = True
            range_queries = q[rows, :, queries]
            # rows and heads are tables of their own; a contiguous range needs no mask
            nearest = self.search(range_queries.flatten(0, 1), buffer.k[rows, :, keys].flatten(0, 1), count, None)
            target = rows, slice(None), queries, slice(nearest.columns.shape[-1])
            products[target] = nearest.products.view(*range_queries.shape[:3], -1)
            index[target] = nearest.columns.view(*range_queries.shape[:3], -1) + keys.start
        if has_ranges:
            return TopProducts(products, index)
        return None


def _weighted_values(weights: Float[Tensor, "b h l n"], v: Float[Tensor, "b h l n f"]) -> Float[Tensor, "b h l f"]:
    return (weights[..., None, :] @ v)[..., 0, :]


def _region_masses(
    weights: Float[Tensor, "b h l s"], memory_share: Float[Tensor, "b h l 1"] | None, query_positions: TokenPositions
) -> Float[Tensor, "3"]:
    """The shares of the memory, of cached local keys and of the current segment, given the local weights."""
    if memory_share is None:
        memory_share = weights.new_zeros(1)
    else:
        memory_share = memory_share.detach()
    memory_share = memory_share.expand(*weights.shape[:3], 1)
    queries = weights.shape[2]
    total = weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
    # the local weights are those of a softmax without the memory: scaled to what the memory leaves
    all_weights = torch.cat([memory_share, weights / total * (1 - memory_share)], -1)
    valid = query_positions.segment_ids != PADDING_SEGMENT
    return region_shares(all_weights, [1, weights.shape[-1] - queries, queries], valid)
