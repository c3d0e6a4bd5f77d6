"""RoutingKernel: attention among the keys of a cluster, found by online k-means (Roy et al. 2021, arXiv:2003.05997)."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.autocast import autocast_disabled
from manyformer.core import PADDING_SEGMENT, ContiguousLayout, LayerOutput, State, TokenPositions, WatchFn, no_watch
from manyformer.kernels.centroids import KMeansCentroids
from manyformer.kernels.kernel import Kernel
from manyformer.ops import chunk_gather_attention, cluster_attention
from manyformer.ops import softmax_attention as ops
from manyformer.ops.bucket_chunks import sort_into_chunks
from manyformer.ops.document_grid import by_run
from manyformer.position import NoPosition, Position
from manyformer.recompute import choose_once


class RoutingState(NamedTuple):
    """A number for the cluster and the document of each token so far, and how many members it had before."""

    group: Int[Tensor, "b h s"] | None = None
    rank: Int[Tensor, "b h s"] | None = None


class RoutingKeys(NamedTuple):
    """What is attended to: keys, values, their places and their likeness to all centroids."""

    k: Float[Tensor, "b h s e"]
    v: Float[Tensor, "b h s f"]
    key_positions: TokenPositions
    near: Float[Tensor, "b h l k"]


class RoutingResult(NamedTuple):
    """Outputs for the tokens of this call, the next state, and weights where they were asked for."""

    y: Float[Tensor, "b h l f"]
    state: RoutingState | None = None
    weights: Float[Tensor, "b h l s"] | None = None


class ClusterMembership(ABC):
    """Who is in which cluster, and whom its members see."""

    streams: bool
    """Whether later tokens leave all that was as it was."""

    @abstractmethod
    def attend(self, keys: RoutingKeys, state: RoutingState | None, *, scale: float, weighed: bool) -> RoutingResult:
        """Outputs for the last tokens, whose likeness is known; `weighed` asks for the weights."""

    @abstractmethod
    def describe(self, tokens: int, state: RoutingState | None, *, weighed: bool) -> str:
        """One sentence about the way that it is computed."""


@final
@dataclass(frozen=True)
class BalancedMembership(ClusterMembership):
    """Each centroid takes the `size` tokens of a document that are nearest to it, as published (algorithm 1).

    Without a `size` they are a document's length over the number of clusters, rounded up. A token may be in several
    clusters, whose outputs are averaged, or in none, where it gets zeros. A later token may drive an earlier one out of
    a cluster: this is not causal, although nobody attends to later tokens.
    """

    size: int | None = None
    streams = False

    def __post_init__(self) -> None:
        if self.size is not None and self.size < 1:
            raise ValueError(f"{self!r}: a cluster must take at least 1 token")

    def attend(self, keys: RoutingKeys, state: RoutingState | None, *, scale: float, weighed: bool) -> RoutingResult:
        k, v, of, near = keys
        if isinstance(of.layout, ContiguousLayout):
            chosen = self._choose(near)
            if not weighed:
                return RoutingResult(cluster_attention.balanced_attention(k, v, chosen, scale=scale))
            y, weights = cluster_attention.balanced_attention_reference(k, v, chosen, scale=scale)
            return RoutingResult(y, weights=weights)
        lines = by_run(of)
        there = lines.present > 0
        chosen = self._choose(lines.scatter(near).masked_fill(~there[:, None, :, None], -torch.inf), there.sum(-1))
        return RoutingResult(
            lines.gather(
                cluster_attention.balanced_attention(lines.scatter(k), lines.scatter(v), chosen, scale=scale),
                k.shape[2],
            )
        )

    def describe(self, tokens: int, state: RoutingState | None, *, weighed: bool) -> str:
        whose = "its share of each document" if self.size is None else f"{self.size} tokens of each document"
        return f"balanced: every cluster takes {whose}"

    def _choose(
        self, near: Float[Tensor, "b h s k"], lengths: Int[Tensor, " b"] | None = None
    ) -> Int[Tensor, "b h k w"]:
        """The members of each cluster, of documents of these lengths or all of the same."""
        length, clusters = near.shape[2:]
        size, share = self.size, None
        if size is None:
            size, share = -(-length // clusters), None if lengths is None else -(-lengths // clusters)
        return choose_once(lambda: cluster_attention.top_members(near.detach(), size, share))


@final
@dataclass(frozen=True)
class NearestMembership(ClusterMembership):
    """Each token is in the cluster of its nearest centroid alone, and sees earlier members of that.

    Clusters are cut into chunks of `size` members in the order of tokens; a token sees those before it in its chunk and
    in the one before. All of this is a matter of the past. The published balance is given up for it: a cluster may have
    any number of members, and the time still grows with the length alone.
    """

    size: int
    streams = True

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"{self!r}: a chunk must have at least 1 token")

    def attend(self, keys: RoutingKeys, state: RoutingState | None, *, scale: float, weighed: bool) -> RoutingResult:
        k, v, of, near = keys
        count, clusters = near.shape[2:]
        q, here = k[:, :, k.shape[2] - count :], of.segment_ids[:, k.shape[2] - count :].expand(len(k), -1)[:, None]
        label = choose_once(lambda: near.detach().argmax(-1))
        group = torch.where(here == PADDING_SEGMENT, PADDING_SEGMENT, here * clusters + label)
        if not weighed and (state is None or state.group is None):
            y, rank = self._chunked(k, v, of, label, scale)
            return RoutingResult(y, None if state is None else RoutingState(group, rank))
        if state is not None and state.group is not None:
            group = torch.cat([state.group, group], dim=-1)
        rank = cluster_attention.ranks(group, count)
        if state is not None and state.rank is not None:
            rank = torch.cat([state.rank, rank], dim=-1)
        after, seen = (
            None if state is None else RoutingState(group, rank),
            cluster_attention.visible_members(group, rank, self.size, count),
        )
        if not weighed:
            return RoutingResult(ops.fused(q, k, v, seen, causal=False, scale=scale), after)
        y, weights = ops.naive(q, k, v, seen, scale=scale, position=NoPosition(), query_positions=of, key_positions=of)
        return RoutingResult(y, after, weights)

    def describe(self, tokens: int, state: RoutingState | None, *, weighed: bool) -> str:
        if weighed or (state is not None and state.group is not None):
            return "dense: the clusters of old and new tokens are compared pair by pair"
        return f"chunked: sorted by cluster, {self.size} tokens with as many before them"

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _chunked(
        self, k: Tensor, v: Tensor, key_positions: TokenPositions, label: Int[Tensor, "b h l"], scale: float
    ) -> tuple[Float[Tensor, "b h l f"], Int[Tensor, "b h l"]]:
        """Outputs, and how many members the cluster of each token had before it."""
        batch, heads, length = label.shape
        seg = key_positions.segment_ids[:, None].expand(label.shape)
        way = sort_into_chunks(label.flatten(0, 1), seg.flatten(0, 1), self.size, unit="bucket", reach=1)
        sight = chunk_gather_attention.ChunkVisibility((way,), 1, 0, causal=True)
        keys, values = (x.reshape(-1, x.shape[-1]) for x in (k, v))
        y = chunk_gather_attention.attend(keys, keys, values, sight, scale=scale)
        return y.view(batch, heads, length, -1), way.rank.view(label.shape)


@final
class RoutingKernel(Kernel):
    """Softmax attention among the tokens of a cluster, keys being queries as well (Roy et al. 2021, section 4).

    Keys are shifted and scaled to mean 0 and variance 1 over their channels, so that likeness is an angle; scores are
    `scale` times their product, 1 / sqrt(e) unless given, where the released code has 1. A token's own key counts only
    where it sees no other: its product with itself, the largest there can be, would hide all others. The commitment to
    centroids is a loss.
    """

    supports: frozenset[str] = frozenset()
    tied_qk = True
    content_based = True

    def __init__(
        self, centroids: KMeansCentroids, membership: ClusterMembership, *, scale: float | None = None
    ) -> None:
        super().__init__()
        self.centroids, self.membership, self.scale = centroids, membership, scale

    def init_state(self, batch: int, *, device: torch.device, dtype: torch.dtype) -> State:
        if not self.membership.streams:
            raise ValueError(
                f"{self.membership!r}: a later token changes who is in a cluster, so nothing can be kept; "
                "Nearest(size) can go on from a state"
            )
        return RoutingState()

    def forward(
        self,
        q: Float[Tensor, "b h l e"],
        k: Float[Tensor, "b g s e"],
        v: Float[Tensor, "b g s f"],
        query_positions: TokenPositions,
        key_positions: TokenPositions,
        position: Position,
        state: State = None,
        watch: WatchFn = no_watch,
    ) -> LayerOutput:
        wide = torch.promote_types(v.dtype, torch.float32)
        scale = 1 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale
        real = (
            None
            if isinstance(query_positions.layout, ContiguousLayout)
            else (query_positions.segment_ids != PADDING_SEGMENT).expand(len(q), -1)
        )
        with autocast_disabled(q.device):
            keys = F.layer_norm(k.to(wide), k.shape[-1:])
            new = keys[:, :, k.shape[2] - q.shape[2] :]
            near = self.centroids(new / math.sqrt(q.shape[-1]), real)
            found = self.membership.attend(
                RoutingKeys(keys, v.to(wide), key_positions, near), state, scale=scale, weighed=watch is not no_watch
            )
        if found.weights is not None:
            watch(self, "weights", found.weights)
        watch(self, "near", near)
        return LayerOutput(found.y.to(v.dtype), found.state, self.centroids.loss(near, real))

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
        return self.membership.describe(q.shape[2], state, weighed=watch is not no_watch)

    def extra_repr(self) -> str:
        return f"{self.membership!r}, scale={self.scale}"
