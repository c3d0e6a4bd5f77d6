"""The edges of a batch of graphs as layers read them: numbered through the rows, and sorted by target."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.core import PADDING_SEGMENT
from manyformer.errors import UserError
from manyformer.structures import GraphEdges

NO_EDGE = -1
"""The source and target of padding among the edges of a row."""


class EdgePlaces(NamedTuple):
    """Where the edges of all rows that join two nodes are, and those that join a node with itself; no padding."""

    links: Int[Tensor, " m"]
    loops: Int[Tensor, " n"]


def sort_edges(
    edges: Int[Tensor, "b m 2"],
    segments: Int[Tensor, "b l"],
    features: Float[Tensor, "b m k"] | None = None,
    *,
    self_loops: bool,
    places: EdgePlaces | None = None,
) -> GraphEdges:
    """The edges (source, target) of each row, columns of the row's nodes, -1 for padding, sorted by target.

    With `self_loops` every node has exactly one edge to itself. Without the `places` of the edges the host waits for
    their number. Raises UserError for an edge of a node that is not there, and ValueError for features of edges
    together with loops, which have none."""
    if self_loops and features is not None:
        raise ValueError("edges have features, but those that join each node with itself have none")
    check_edges(edges, segments)
    rows, length = segments.shape
    nodes = rows * length
    row_offsets = torch.arange(rows, device=edges.device)[:, None, None] * length
    numbered = (edges + row_offsets).flatten(0, 1)
    edge_features = None if features is None else features.flatten(0, 1)
    if places is not None:
        chosen = places.links if self_loops else torch.cat(places)
        numbered = numbered.index_select(0, chosen)
        if edge_features is None:
            edge_features = None
        else:
            edge_features = edge_features.index_select(0, chosen)
    elif not edges.is_meta:
        valid = edges[..., 0].flatten() != NO_EDGE
        if self_loops:
            valid &= numbered[:, 0] != numbered[:, 1]
        numbered = numbered[valid]
        if edge_features is None:
            edge_features = None
        else:
            edge_features = edge_features[valid]
    if self_loops:
        loops = torch.arange(nodes, device=edges.device)[:, None].expand(-1, 2)
        numbered = torch.cat([numbered, loops])
    targets, order = numbered[:, 1].sort(stable=True)
    sources = numbered[:, 0].index_select(0, order)
    bounds = torch.arange(nodes + 1, device=edges.device)
    row_starts = torch.searchsorted(targets, bounds)
    sorted_features = None
    if edge_features is not None:
        sorted_features = edge_features.index_select(0, order)
    return GraphEdges(sources, targets, row_starts, sorted_features)


def check_edges(edges: Int[Tensor, "b m 2"], segments: Int[Tensor, "b l"]) -> None:
    """Raise UserError for an edge of a node that is not there, or between two graphs; on a CPU alone."""
    if edges.device.type != "cpu" or not edges.numel():
        return
    length = segments.shape[1]
    missing = (edges < NO_EDGE) | (edges >= length) | ((edges == NO_EDGE) != (edges == NO_EDGE).flip(-1))
    if missing.any():
        row, edge, _ = (int(index) for index in missing.nonzero()[0])
        source, target = edges[row, edge].tolist()
        raise UserError(f"edge {edge} of row {row} is from node {source} to {target}, and nodes are 0 to {length - 1}")
    ends = segments.gather(1, edges.clamp(min=0).flatten(1)).view_as(edges)
    misplaced = (edges[..., 0] != NO_EDGE) & ((ends[..., 0] != ends[..., 1]) | (ends[..., 0] == PADDING_SEGMENT))
    if misplaced.any():
        row, edge = (int(index) for index in misplaced.nonzero()[0])
        source, target = edges[row, edge].tolist()
        raise UserError(
            f"edge {edge} of row {row} is from node {source} to {target}, and these are not nodes of one graph"
        )
