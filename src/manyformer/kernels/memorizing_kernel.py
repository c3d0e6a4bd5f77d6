"""Attention that also looks up the nearest of very many old keys, which get no gradient."""

from abc import ABC, abstractmethod
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from manyformer.core import PADDING_SEGMENT, LayerOutput, State, TokenPositions, WatchFn, no_watch
from manyformer.kernels.kernel import Kernel
from manyformer.kernels.key_search import ExactSearch, KeySearch
from manyformer.kernels.kv_buffer import BlockHistory, KVBuffer, append, empty_buffer, shared_key_ranges, trim
from manyformer.kernels.softmax_kernel import SoftmaxKernel
from manyformer.ops.region_shares import shares
from manyformer.ops.softmax_attention import weights_of
from manyformer.ops.top_products import TopProducts
from manyformer.position import Position
from manyformer.training_hooks import StatefulAcrossBatches


class LocalAttentionCall(NamedTuple):
    """The call of the kernel that attends to what is near."""

    inner: SoftmaxKernel
    q: Float[Tensor, "b h l e"]
    k: Float[Tensor, "b h s e"]
    v: Float[Tensor, "b h s f"]
    query_positions: TokenPositions
    key_positions: TokenPositions
    position: Position
    watch: WatchFn

    @property
    def scale(self) -> float:
        """What products are multiplied by."""
        return self.q.shape[-1] ** -0.5 if self.inner.scale is None else self.inner.scale

    def local_output(self) -> Float[Tensor, "b h l f"]:
        """What the kernel makes of what is near."""
        inner, *call, watch = self
        y: Tensor = inner(*call, None, watch).y
        return y


class RetrievedPairs(NamedTuple):
    """What a memory has for each query: scores, values, and which of them there really are."""

    scores: Float[Tensor, "b h l n"]
    v: Float[Tensor, "b h l n f"]
    visible: Bool[Tensor, "b h l n"]


class CombinedOutput(NamedTuple):
    """Outputs, and the share of each that is from the memory; None for nothing."""

    y: Float[Tensor, "b h l f"]
    memory_share: Float[Tensor, "b h l 1"] | None = None


class MemoryCombiner(nn.Module, ABC):
    """How what is near and what was found become one."""

    @abstractmethod
    def forward(self, local: LocalAttentionCall, found: RetrievedPairs | None) -> CombinedOutput:
        """`found` is None where no query can see anything in the memory."""


@final
class GatedCombiner(MemoryCombiner):
    """(1 - g) near + g found, each a softmax of its own, g = sigmoid(bias) a number for each head (section 3.2).

    Where nothing is found, g counts as 0: the authors' code reads zeros from a memory that is empty.
    """

    def __init__(self, heads: int, *, bias: float = 0.0) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.full((heads,), bias))

    def forward(self, local: LocalAttentionCall, found: RetrievedPairs | None) -> CombinedOutput:
        y = local.local_output()
        gate = self.bias.to(y.dtype).sigmoid()[:, None, None]
        if found is None:
            # a gradient all the same: processes that train together wait for each other's
            return CombinedOutput(y + 0.0 * gate if torch.is_grad_enabled() else y)
        weights = weights_of(found.scores, found.visible).to(y.dtype)
        gate = gate * found.visible.any(-1, keepdim=True)
        return CombinedOutput(y + gate * (_mixed(weights, found.v) - y), gate)


@final
class JointSoftmaxCombiner(MemoryCombiner):
    """One softmax over what is near and what was found, as in the first version of the paper (ICLR submission)."""

    def forward(self, local: LocalAttentionCall, found: RetrievedPairs | None) -> CombinedOutput:
        if found is None:
            return CombinedOutput(local.local_output())
        inner, q, k, v, at, of, position, watch = local
        near = position.score(q @ k.mT * local.scale, q, k, at, of)
        mask = torch.cat([found.visible, inner.mask.dense(at, of, q.shape[1]).expand(near.shape)], -1)
        weights = weights_of(torch.cat([found.scores, near], -1), mask).to(v.dtype)
        far, near = torch.split(weights, [found.scores.shape[-1], k.shape[2]], -1)
        watch(inner, "weights", near)
        y = position.value(near @ v, near, at, of) + _mixed(far, found.v)
        return CombinedOutput(y, far.sum(-1, keepdim=True))


@final
class MemorizingKernel(Kernel, StatefulAcrossBatches):
    """`inner` for what is near, and the nearest of `size` pairs for each query and head (Wu et al. 2022, section 3.2).

    A document has a memory of its own in each row: its tokens in blocks of `block`, of which each sees the last `size`
    before it, whatever pieces it is read in (the paper: of a segment, then the segment is added). Keys and values are
    kept as they were when they were read; they get no gradient, the queries do through what they find. `neighbours` are
    looked up for each query by products alone, without positions; keys that a position has turned are refused. Needs
    a source that gives the stream's own keys last, such as `Own` and `SegmentMemorySource`.
    """

    supports = frozenset({"query", "score", "value"})
    regions = ("memory", "lately", "segment")

    def __init__(
        self,
        inner: SoftmaxKernel,
        heads: int,
        width: int,
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
                f"MemorizingKernel: size ({size}), neighbours ({neighbours}) and block ({block}) are at least 1"
            )
        self.inner, self.heads, self.width, self.neighbours = inner, heads, width, neighbours
        self.seeing = BlockHistory(size, block)
        self.combine = GatedCombiner(heads) if combine is None else combine
        self.search = ExactSearch() if search is None else search

    def init_state(self, batch: int, *, device: torch.device, dtype: torch.dtype) -> State:
        return empty_buffer(batch, self.heads, self.width, self.width, device=device, dtype=dtype)

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
        rows, new = q.shape[0], k.shape[2] - q.shape[2]
        here = query_positions._replace(
            position_ids=query_positions.position_ids.expand(rows, -1),
            segment_ids=query_positions.segment_ids.expand(rows, -1),
        )
        own = k.detach()[:, :, new:], v.detach()[:, :, new:]
        keep = self.seeing.needed
        store = (
            KVBuffer(*own, here.position_ids, here.segment_ids, 0, q.shape[2])
            if state is None
            else append(state, *own, here, keep)
        )
        seen = no_watch if watch is no_watch else _Seen(self, watch)
        local = LocalAttentionCall(self.inner, q, k, v, query_positions, key_positions, position, seen)
        y, far = self.combine(
            local, None if self.seeing.nothing(query_positions) else self._found(q, store, here, local.scale)
        )
        if isinstance(seen, _Seen):
            seen.report(far, here)
        return LayerOutput(y, None if state is None else trim(store, query_positions, keep))

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
        near = self.inner.explain(q, k, v, query_positions, key_positions, position, None, watch)
        held = (0 if state is None else state.end - state.begin) + q.shape[2]
        alike = (
            "side by side"
            if shared_key_ranges(self.seeing, query_positions, held) is not None
            else "hidden key by key, by torch"
        )
        return f"{near}; {self.neighbours} of {held} pairs looked up by {self.search.name}, {alike}"

    def extra_repr(self) -> str:
        size, block = self.seeing
        return f"size={size}, block={block}, neighbours={self.neighbours}, search={self.search.name}"

    def _found(
        self, q: Tensor, store: KVBuffer, query_positions: TokenPositions, scale: float
    ) -> RetrievedPairs | None:
        """The nearest of what each query may see."""
        used = store.used
        best = self._nearest(q.detach().to(store.k.dtype), used, query_positions)
        if best is None:
            return None
        # the buffers of all rows and heads are one table
        first = torch.arange(q.shape[0] * q.shape[1], device=q.device).view(*q.shape[:2], 1, 1) * store.k.shape[2]
        index = best.columns + (first + store.begin)
        k, v = (F.embedding(index, part.reshape(-1, part.shape[-1])).to(q.dtype) for part in (store.k, store.v))
        return RetrievedPairs((k @ q[..., None])[..., 0] * scale, v, best.products > -torch.inf)

    def _nearest(self, q: Tensor, store: KVBuffer, query_positions: TokenPositions) -> TopProducts | None:
        """Products and columns of the nearest; None where there are none."""
        count = min(self.neighbours, store.end)
        products = q.new_full((*q.shape[:3], count), -torch.inf)
        index = torch.zeros(products.shape, dtype=torch.long, device=q.device)
        alike = shared_key_ranges(self.seeing, query_positions, store.end)
        if alike is None:
            hidden = self.seeing.hidden(query_positions, TokenPositions(store.pos, store.seg))
            for row in range(len(q)):
                products[row], index[row] = self.search(q[row], store.k[row], count, hidden[row])
            return TopProducts(products, index)
        some = False
        for rows, queries, keys in alike:
            some = True
            here = q[rows, :, queries]
            best = self.search(here.flatten(0, 1), store.k[rows, :, keys].flatten(0, 1), count, None)
            into = rows, slice(None), queries, slice(best.columns.shape[-1])
            products[into] = best.products.view(*here.shape[:3], -1)
            index[into] = best.columns.view(*here.shape[:3], -1) + keys.start
        return TopProducts(products, index) if some else None


def _mixed(weights: Float[Tensor, "b h l n"], v: Float[Tensor, "b h l n f"]) -> Float[Tensor, "b h l f"]:
    return (weights[..., None, :] @ v)[..., 0, :]


class _Seen:
    """A watcher that keeps the weights of what is near, and passes everything on."""

    def __init__(self, kernel: MemorizingKernel, watch: WatchFn) -> None:
        self._kernel, self._watch = kernel, watch
        self._weights: Float[Tensor, "b h l s"] | None = None

    def __call__(self, module: nn.Module, name: str, value: Tensor) -> None:
        if module is self._kernel.inner and name == "weights":
            self._weights = value.detach()
        self._watch(module, name, value)

    def report(self, far: Float[Tensor, "b h l 1"] | None, query_positions: TokenPositions) -> None:
        """Tell which shares go to the memory, to what was lately and to the segment."""
        if (near := self._weights) is None:
            return
        far = near.new_zeros(*near.shape[:3], 1) if far is None else far.detach().expand(*near.shape[:3], 1)
        own = near.shape[2]
        near = near / near.sum(-1, keepdim=True).clamp(min=torch.finfo(near.dtype).tiny) * (1 - far)
        told = shares(
            torch.cat([far, near], -1), [1, near.shape[-1] - own, own], query_positions.segment_ids != PADDING_SEGMENT
        )
        self._watch(self._kernel, "mass", told)
