"""Routing attention: softmax within clusters of online k-means (Roy et al. 2021, arXiv:2003.05997)."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.nn.clustered import bucket_chunks, chunk_gather_attention
from manyformer.nn.clustered.bucket_chunks import sort_into_chunks, units_per_row
from manyformer.nn.clustered.centroids import KMeansCentroids
from manyformer.nn.core import (
    PADDING_SEGMENT,
    ContiguousLayout,
    LayerOutput,
    PackedLayout,
    State,
    TokenPositions,
    no_watch,
)
from manyformer.nn.kernels.kernel import Kernel, KernelCall
from manyformer.nn.ops import softmax_attention as ops
from manyformer.nn.ops.document_rows import grid_by_run
from manyformer.nn.runtime.recompute import choose_once
from manyformer.nn.runtime.torch_internals import autocast_disabled, compiler_disabled


class RoutingState(NamedTuple):
    """One id for cluster and document of each token so far, and the number of earlier members of that group."""

    group_ids: Int[Tensor, "b h s"] | None = None
    ranks: Int[Tensor, "b h s"] | None = None


class RoutingKeys(NamedTuple):
    """Keys, values, their positions, and the cosines of the last keys with all centroids."""

    k: Float[Tensor, "b h s e"]
    v: Float[Tensor, "b h s f"]
    key_positions: TokenPositions
    cosines: Float[Tensor, "b h l k"]


class RoutingResult(NamedTuple):
    """Outputs of the tokens of this call, the next state, and the weights if requested."""

    y: Float[Tensor, "b h l f"]
    state: RoutingState | None = None
    weights: Float[Tensor, "b h l s"] | None = None


class ClusterMembership(ABC):
    """Assigns tokens to clusters and attends within them."""

    is_causal: bool
    """Whether memberships and outputs of a token are independent of later tokens."""

    @abstractmethod
    def attend(
        self, keys: RoutingKeys, state: RoutingState | None, *, scale: float, return_weights: bool
    ) -> RoutingResult:
        """Compute the outputs of the tokens that `keys.cosines` belong to, and the weights if `return_weights`."""

    @abstractmethod
    def describe(self, tokens: int, state: RoutingState | None, *, return_weights: bool) -> str:
        """Return one sentence about the path of this call."""


@final
@dataclass(frozen=True)
class BalancedMembership(ClusterMembership):
    """Each cluster has the `size` tokens of a document that are nearest to its centroid, as published (algorithm 1).

    `size` is by default the document's length over the number of clusters, rounded up. A token may belong to several
    clusters, whose outputs are averaged, or to none, and then gets zeros. A later token may replace an earlier one in a
    cluster: membership is not causal, although no token attends to later tokens.
    """

    size: int | None = None
    is_causal = False

    def __post_init__(self) -> None:
        if self.size is not None and self.size < 1:
            raise ValueError(f"{self!r}: a cluster must take at least 1 token")

    def attend(
        self, keys: RoutingKeys, state: RoutingState | None, *, scale: float, return_weights: bool
    ) -> RoutingResult:
        k, v, key_positions, cosines = keys
        if isinstance(key_positions.layout, ContiguousLayout):
            members = self._select_members(cosines)
            if not return_weights:
                return RoutingResult(bucket_chunks.balanced_attention(k, v, members, scale=scale))
            y, weights = bucket_chunks.balanced_attention_reference(k, v, members, scale=scale)
            return RoutingResult(y, weights=weights)
        documents = grid_by_run(key_positions)
        present = documents.present > 0
        # padding is near to no centroid
        cosines = documents.scatter(cosines).masked_fill(~present[:, None, :, None], -torch.inf)
        members = self._select_members(cosines, present.sum(-1))
        y = bucket_chunks.balanced_attention(documents.scatter(k), documents.scatter(v), members, scale=scale)
        return RoutingResult(documents.gather(y, k.shape[2]))

    def describe(self, tokens: int, state: RoutingState | None, *, return_weights: bool) -> str:
        share = "its share of each document"
        if self.size is not None:
            share = f"{self.size} tokens of each document"
        return f"balanced: every cluster takes {share}"

    def _select_members(
        self, cosines: Float[Tensor, "b h s k"], lengths: Int[Tensor, " b"] | None = None
    ) -> Int[Tensor, "b h k w"]:
        """Select the members of each cluster; `lengths` are those of the documents if they differ."""
        length, clusters = cosines.shape[2:]
        size = self.size
        limits = None
        if size is None:
            size = -(-length // clusters)
            limits = None if lengths is None else -(-lengths // clusters)
        return choose_once(lambda: bucket_chunks.top_members(cosines.detach(), size, limits))


@final
@dataclass(frozen=True)
class NearestMembership(ClusterMembership):
    """Each token belongs to the cluster of its nearest centroid, and sees earlier members of that cluster.

    The members of a cluster are cut, in token order, into chunks of `size`; a token sees the earlier tokens of its
    chunk and the preceding chunk. This is causal, but unlike the published membership not balanced: a cluster may have
    any number of members. Time is still linear in the length.
    """

    size: int
    is_causal = True

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"{self!r}: a chunk must have at least 1 token")

    def attend(
        self, keys: RoutingKeys, state: RoutingState | None, *, scale: float, return_weights: bool
    ) -> RoutingResult:
        k, v, key_positions, cosines = keys
        count, clusters = cosines.shape[2:]
        q = k[:, :, k.shape[2] - count :]
        segment_ids = key_positions.segment_ids[:, k.shape[2] - count :].expand(k.shape[0], -1)[:, None]
        clusters_of_tokens = choose_once(lambda: cosines.detach().argmax(-1))
        # one id for a cluster of a document, so that documents of a row share nothing
        new_ids = segment_ids * clusters + clusters_of_tokens
        group_ids = torch.where(segment_ids == PADDING_SEGMENT, PADDING_SEGMENT, new_ids)
        if not return_weights and (state is None or state.group_ids is None):
            y, ranks = self._attend_chunked(k, v, key_positions, clusters_of_tokens, clusters, scale)
            return RoutingResult(y, None if state is None else RoutingState(group_ids, ranks))
        if state is not None and state.group_ids is not None:
            group_ids = torch.cat([state.group_ids, group_ids], dim=-1)
        ranks = bucket_chunks.ranks(group_ids, count)
        if state is not None and state.ranks is not None:
            ranks = torch.cat([state.ranks, ranks], dim=-1)
        new_state = None
        if state is not None:
            new_state = RoutingState(group_ids, ranks)
        visible = bucket_chunks.visible_members(group_ids, ranks, self.size, count)
        if not return_weights:
            return RoutingResult(ops.fused_attention(q, k, v, visible, causal=False, scale=scale), new_state)
        weights = ops.masked_softmax(q @ k.mT * scale, visible).to(q.dtype)
        return RoutingResult(weights @ v, new_state, weights)

    def describe(self, tokens: int, state: RoutingState | None, *, return_weights: bool) -> str:
        if return_weights or (state is not None and state.group_ids is not None):
            return "dense: the clusters of cached and new tokens are compared pair by pair"
        return f"chunked: sorted by cluster, chunks of {self.size} tokens with the preceding chunk"

    @compiler_disabled
    def _attend_chunked(
        self,
        k: Tensor,
        v: Tensor,
        key_positions: TokenPositions,
        clusters: Int[Tensor, "b h l"],
        cluster_count: int,
        scale: float,
    ) -> tuple[Float[Tensor, "b h l f"], Int[Tensor, "b h l"]]:
        """Outputs, and the number of earlier members of each token's cluster."""
        batch, heads, length = clusters.shape
        segment_ids = key_positions.segment_ids[:, None].expand(clusters.shape)
        # one chunk back is what `visible_members` shows
        chunks = sort_into_chunks(
            clusters.flatten(0, 1),
            segment_ids.flatten(0, 1),
            self.size,
            unit="bucket",
            reach=1,
            max_units=units_per_row(key_positions, "bucket", cluster_count),
        )
        visibility = chunk_gather_attention.ChunkVisibility((chunks,), 1, 0, causal=True)
        keys, values = (x.reshape(-1, x.shape[-1]) for x in (k, v))
        y = chunk_gather_attention.chunk_gather_attention(keys, keys, values, visibility, scale=scale)
        return y.view(batch, heads, length, -1), chunks.rank.view(clusters.shape)


@final
class RoutingKernel(Kernel):
    """Softmax attention within clusters of tokens, keys being queries as well (Roy et al. 2021, section 4).

    Keys are layer-normalized without parameters, so that their similarity is a cosine; scores are `scale` times the
    dot product, 1 / sqrt(e) by default, where the released code has 1. A token attends to its own key only where it
    sees no other, because the product with itself is the largest possible and would dominate all others. The
    commitment to centroids is the auxiliary loss.
    """

    supports: frozenset[str] = frozenset()
    tied_qk = True
    content_based = True

    def __init__(
        self, centroids: KMeansCentroids, membership: ClusterMembership, *, scale: float | None = None
    ) -> None:
        super().__init__()
        self.centroids = centroids
        self.membership = membership
        self.scale = scale

    def init_state(self, batch: int, *, device: torch.device, dtype: torch.dtype) -> State:
        if not self.membership.is_causal:
            raise ValueError(
                f"{self.membership!r} is not causal, so it cannot continue from a state; NearestMembership(size) can"
            )
        return RoutingState()

    def forward(self, call: KernelCall) -> LayerOutput:
        q = call.q
        k = call.k
        v = call.v
        query_positions = call.query_positions
        compute_dtype = torch.promote_types(v.dtype, torch.float32)
        if self.scale is None:
            scale = 1 / math.sqrt(q.shape[-1])
        else:
            scale = self.scale
        is_contiguous = isinstance(query_positions.layout, ContiguousLayout)
        return_weights = call.watch is not no_watch
        if is_contiguous:
            valid = None
        else:
            valid = (query_positions.segment_ids != PADDING_SEGMENT).expand(q.shape[0], -1)
        count = None
        if isinstance(query_positions.layout, PackedLayout):
            count = query_positions.layout.token_count
        with autocast_disabled(q.device):
            keys = F.layer_norm(k.to(compute_dtype), k.shape[-1:])
            new_keys = keys[:, :, k.shape[2] - q.shape[2] :]
            # layer-normalized vectors have the length sqrt(e)
            cosines = self.centroids(new_keys / math.sqrt(q.shape[-1]), valid, count)
            tokens = RoutingKeys(keys, v.to(compute_dtype), call.key_positions, cosines)
            result = self.membership.attend(tokens, call.state, scale=scale, return_weights=return_weights)
        if result.weights is not None:
            call.watch(self, "weights", result.weights)
        call.watch(self, "near", cosines)
        return LayerOutput(result.y.to(v.dtype), result.state, self.centroids.loss(cosines, valid))

    def explain(self, call: KernelCall) -> str:
        return self.membership.describe(call.q.shape[2], call.state, return_weights=call.watch is not no_watch)

    def extra_repr(self) -> str:
        return f"{self.membership!r}, scale={self.scale}"
