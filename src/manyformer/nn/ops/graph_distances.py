"""Shortest paths between all nodes of graphs: their lengths, and sums of terms along them."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.nn.core import GraphEdges
from manyformer.nn.runtime.devices import float64_device

NO_PATH = -1
"""The distance of two nodes that no path of the allowed length joins."""


def graph_distances(edges: GraphEdges, length: int, max_distance: int) -> Int[Tensor, "nodes l"]:
    """The number of edges on a shortest path to each node from each node of its row, -1 beyond `max_distance`.

    All sources advance by one edge at a time, in time O(e l) each. Rows have `length` nodes; entry (n, j) is the
    distance from column j of the row of node n to node n."""
    frontier = _identity(edges, length)
    distances = torch.where(frontier, 0, NO_PATH)
    for distance in range(1, max_distance + 1):
        messages = frontier.index_select(0, edges.sources).int()
        arrived = torch.zeros_like(frontier, dtype=messages.dtype).index_add_(0, edges.targets, messages) > 0
        # nodes that were reached sooner keep their distance
        frontier = arrived & (distances == NO_PATH)
        distances = torch.where(frontier, distance, distances)
    return distances


def mean_along_shortest_paths(
    edge_terms: Float[Tensor, "hops edges h"], distances: Int[Tensor, "nodes l"], edges: GraphEdges
) -> Float[Tensor, "nodes l h"]:
    """The mean of `edge_terms[n]` at the n-th edge of a path, averaged over all shortest paths between two nodes.

    Zero from a node to itself, and where there is no path of at most `hops` edges. The number of paths is exact up to
    2^53."""
    exact_device = float64_device(edge_terms.device)
    sources, targets, exact_distances = (x.to(exact_device) for x in (edges.sources, edges.targets, distances))
    # numbers of paths grow exponentially: float64 counts them exactly up to 2^53
    path_counts = _identity(edges, distances.shape[1]).to(exact_device).double()
    sums = edge_terms.new_zeros(*distances.shape, edge_terms.shape[-1])
    for hop, terms in enumerate(edge_terms, 1):
        source_counts = path_counts.index_select(0, sources)
        is_last_edge = (exact_distances.index_select(0, targets) == hop) & (
            exact_distances.index_select(0, sources) == hop - 1
        )
        weights = source_counts * is_last_edge
        arrived = torch.zeros_like(path_counts).index_add_(0, targets, weights)
        # each last edge has the share of the paths that come along it, so that sums stay means over paths
        shares = (weights / arrived.index_select(0, targets).clamp(min=1)).to(sums.dtype).to(sums.device)
        extended = (sums.index_select(0, edges.sources) + terms[:, None]) * shares[..., None]
        sums = sums.index_add(0, edges.targets, extended)
        path_counts = path_counts + arrived
    return sums / distances.clamp(min=1)[..., None]


def _identity(edges: GraphEdges, length: int) -> Bool[Tensor, "nodes l"]:
    """Whether each column of its row is the node itself."""
    columns = torch.arange(length, device=edges.sources.device)
    nodes = torch.arange(len(edges.row_starts) - 1, device=columns.device)
    return (nodes[:, None] % max(1, length)) == columns
