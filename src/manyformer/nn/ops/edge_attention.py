"""Softmax and weighted sums over the edges that end at a node, in time and memory linear in the edges."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import FunctionCtx

from manyformer.nn.core import GraphEdges


def edge_softmax(scores: Float[Tensor, "edges h"], edges: GraphEdges) -> Float[Tensor, "edges h"]:
    """The softmax of the scores over all edges that end at the same node, for each head."""
    weights: Tensor = _EdgeSoftmax.apply(scores, edges.targets, len(edges.row_starts) - 1)  # type: ignore[no-untyped-call]
    return weights


def sum_over_edges(
    weights: Float[Tensor, "edges h"], values: Float[Tensor, "nodes h e"], edges: GraphEdges
) -> Float[Tensor, "nodes h e"]:
    """The sum of the values of the sources of all edges that end at a node, weighted for each head; 0 without edges.

    The values of the edges are not stored for the gradient."""
    sums: Tensor = _EdgeSum.apply(weights, values, edges.sources, edges.targets)  # type: ignore[no-untyped-call]
    return sums


def _sum_by_node(x: Float[Tensor, "edges *c"], index: Int[Tensor, " edges"], nodes: int) -> Float[Tensor, "nodes *c"]:
    return x.new_zeros(nodes, *x.shape[1:]).index_add_(0, index, x)


class _EdgeSoftmax(torch.autograd.Function):
    """da_ij = a_ij (g_ij - sum_k a_ik g_ik), with which only the weights are stored."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, targets: Tensor, nodes: int) -> Tensor:
        index = targets[:, None].expand_as(scores)
        # subtracted before the exponential, as in any softmax; nodes without edges keep -inf and are never read
        highest = scores.new_full((nodes, scores.shape[1]), -torch.inf).scatter_reduce_(0, index, scores, "amax")
        weights = (scores - highest.index_select(0, targets)).exp_()
        weights /= _sum_by_node(weights, targets, nodes).index_select(0, targets)
        ctx.save_for_backward(weights, targets)
        ctx.nodes = nodes
        return weights

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        weights, targets = ctx.saved_tensors
        product = weights * gradient
        sums = _sum_by_node(product, targets, ctx.nodes)
        return product - weights * sums.index_select(0, targets), None, None


class _EdgeSum(torch.autograd.Function):
    """The gradient gathers the values again."""

    @staticmethod
    def forward(ctx: FunctionCtx, weights: Tensor, values: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(weights, values, sources, targets)
        messages = values.index_select(0, sources).mul_(weights[..., None])
        return _sum_by_node(messages, targets, len(values))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        weights, values, sources, targets = ctx.saved_tensors
        # numbers of all edges exist one tensor at a time: they are the largest of a layer
        messages = gradient.index_select(0, targets)
        weights_gradient = (messages * values.index_select(0, sources)).sum(-1)
        values_gradient = _sum_by_node(messages * weights[..., None], sources, len(values))
        return weights_gradient, values_gradient, None, None
