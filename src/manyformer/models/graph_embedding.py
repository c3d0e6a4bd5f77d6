"""The inputs of models of graphs: edges as layers read them, features of nodes, encodings of a graph's structure."""

from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from manyformer.base.errors import UserError
from manyformer.models.embedding import positions_of
from manyformer.nn.core import PADDING_SEGMENT, Context, GraphEdges
from manyformer.nn.runtime.device_reads import is_readable
from manyformer.nn.runtime.devices import float64_device
from manyformer.nn.runtime.dropout import Dropout
from manyformer.nn.runtime.handwritten_gradient import HandwrittenGradient
from manyformer.nn.runtime.torch_internals import lacks_numbers, weight_dtype
from manyformer.nn.runtime.training_hooks import UndecayedParameters

NO_EDGE = -1
"""The source and target of padding among the edges of a row."""


NO_PATH = -1
"""The distance of two nodes that no path of the allowed length joins."""


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
        if edges.device.type == "cpu" and lacks_numbers(edges):
            raise UserError(
                "the number of edges of a graph is data, which vmap, fake tensors and traced graphs do not know: "
                "compute graphs one after another, with their numbers"
            )
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
    if not is_readable(edges) or not edges.numel():
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


@final
class FeatureEmbedding(nn.Module):
    """A projection of `features` numbers of each node to `dim` channels, with dropout of these numbers.

    Sparse features are the values of a few columns of each node: time and memory are then linear in these values, and
    dropout draws random numbers for them alone, which is the same since a zero stays a zero. Raises UserError for
    features of another width."""

    def __init__(self, features: int, dim: int, *, dropout: float = 0.0, bias: bool = False) -> None:
        super().__init__()
        self.features = features
        self.dim = dim
        self.dropout = Dropout(dropout)
        self.weight = nn.Parameter(torch.empty(features, dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if bias else None
        nn.init.xavier_uniform_(self.weight)

    def forward(
        self, values: Float[Tensor, "b l k"], columns: Int[Tensor, "b l k"] | None = None
    ) -> Float[Tensor, "b l d"]:
        """The projection of dense features (b, l, features), or of `values` in these columns of each node."""
        rows, length, width = values.shape
        if columns is None and width != self.features:
            raise UserError(f"a node has {width} features, but this model was built with features={self.features}")
        values = self.dropout(values.to(self.weight.dtype))
        if columns is None:
            y = values @ self.weight
        else:
            check_columns(columns, self.features)
            flat_columns = columns.reshape(-1, width)
            flat_values = values.reshape(-1, width)
            # never the dense matrix of nodes and features, most of which are zero
            y = sparse_product(flat_values, flat_columns, self.weight)
            y = y.view(rows, length, self.dim)
        if self.bias is None:
            return y
        return y + self.bias


def check_columns(columns: Int[Tensor, "b l k"], features: int) -> None:
    """Raise UserError for a column that is none of the features; on other devices than a CPU torch itself does."""
    if not is_readable(columns) or not columns.numel():
        return
    lowest = int(columns.min())
    highest = int(columns.max())
    if lowest < 0 or highest >= features:
        raise UserError(
            f"the columns of sparse features are {lowest} to {highest}, but this model was built with "
            f"features={features}"
        )


@final
class LaplacianEmbedding(nn.Module):
    """A projection of `count` eigenvectors, whose signs are drawn anew in training (Dwivedi and Bresson 2021, 2.1).

    An eigenvector and its negative are equally valid; each row of a batch has signs of its own."""

    def __init__(self, count: int, dim: int) -> None:
        super().__init__()
        self.count = count
        self.projection = nn.Linear(count, dim)

    def forward(self, eigenvectors: Float[Tensor, "b l k"]) -> Float[Tensor, "b l d"]:
        eigenvectors = eigenvectors.to(weight_dtype(self.projection))
        if self.training:
            # one sign for a whole row: the vectors of two of its nodes must not be mixed
            signs = torch.randint(2, (len(eigenvectors), 1, self.count), device=eigenvectors.device) * 2 - 1
            eigenvectors = eigenvectors * signs
        positions: Tensor = self.projection(eigenvectors)
        return positions


INITIAL_STD = 0.02


@final
class GraphormerEncoding(nn.Module, UndecayedParameters):
    """Centrality, spatial and edge encodings (Ying et al. 2021, sections 3.1.1 to 3.1.3) and the virtual node of 3.2.

    Each node's in-degree and out-degree, up to `max_degree`, select vectors that are added to it. The length of the
    shortest path between two nodes selects a number for each head that is added to their score in all layers, and the
    mean over the edges of the path of the products of their features with a vector of the edge's place is another.
    Beyond `max_distance` edges all pairs share one number, also those without a path, which the paper keeps apart; and
    the mean is over all shortest paths, of which the paper takes one, so that it does not depend on the order of nodes.

    A virtual node is a first token that is joined with all others by a number of its own."""

    undecayed = ("path", "virtual_node")

    def __init__(
        self, dim: int, heads: int, *, max_degree: int, max_distance: int, edge_features: int, virtual_node: bool
    ) -> None:
        super().__init__()
        if max_distance < 1:
            raise ValueError(f"max_distance ({max_distance}) must be at least 1 edge")
        self.max_degree = max_degree
        self.max_distance = max_distance
        self.in_degree, self.out_degree = (nn.Embedding(max_degree + 1, dim) for _ in range(2))
        # distances from 0 on, and one more entry for all pairs beyond the largest
        self.distance = nn.Embedding(max_distance + 2, heads)
        for table in (self.in_degree, self.out_degree, self.distance):
            nn.init.normal_(table.weight, std=INITIAL_STD)
        # the vector of each place on a path, for each head
        self.path = _normal(max_distance, edge_features, heads) if edge_features else None
        self.virtual_node = _normal(1, 1, dim) if virtual_node else None
        self.virtual_score = _normal(heads) if virtual_node else None

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context) -> tuple[Float[Tensor, "b m d"], Context]:
        """The nodes with their degrees, and a context with the scores of pairs; with a virtual node it comes first."""
        edges = ctx.positions.edges
        assert edges is not None
        x = x + self._centrality(edges).view_as(x)
        scores = self._pair_scores(edges, *x.shape[:2])
        positions = ctx.positions
        if self.virtual_node is not None and self.virtual_score is not None:
            x = torch.cat([self.virtual_node.to(x.dtype).expand(len(x), -1, -1), x], 1)
            # the virtual node belongs to document 0, the only one of a row
            segments = F.pad(positions.segment_ids, (1, 0))
            positions, _ = positions_of(segments, segments, None)
            # pairs with the virtual node, in the first row and the first column, have one score of their own
            is_real = F.pad(torch.ones_like(scores[:, :, :1], dtype=torch.bool), (1, 0, 0, 0, 1, 0))
            scores = torch.where(is_real, F.pad(scores, (1, 0, 0, 0, 1, 0)), self.virtual_score[:, None])
        return x, Context(positions._replace(pair_scores=scores), watch=ctx.watch)

    def _centrality(self, edges: GraphEdges) -> Float[Tensor, "nodes d"]:
        nodes = len(edges.row_starts) - 1
        out_degrees = torch.zeros(nodes, dtype=torch.long, device=edges.sources.device)
        out_degrees = out_degrees.index_add(0, edges.sources, torch.ones_like(edges.sources))
        # edges are sorted by target, so that these are counted already
        in_degrees = edges.row_starts.diff()
        centrality: Tensor = self.in_degree(in_degrees.clamp(max=self.max_degree))
        return centrality.add(self.out_degree(out_degrees.clamp(max=self.max_degree)))

    def _pair_scores(self, edges: GraphEdges, rows: int, length: int) -> Float[Tensor, "b l h l"]:
        """The scores of each query i with each key j by the paths from i to j."""
        distances = graph_distances(edges, length, self.max_distance)
        scores = self.distance(distances.where(distances != NO_PATH, self.max_distance + 1))
        if self.path is not None:
            assert edges.features is not None
            terms = edges.features.to(self.path.dtype) @ self.path
            scores = scores + mean_along_shortest_paths(terms, distances, edges)
        # paths are listed from their targets back, while scores have the query, the source, first
        by_target: Float[Tensor, "b j i h"] = scores.view(rows, length, length, scores.shape[-1])
        return by_target.permute(0, 2, 3, 1)


def _normal(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * INITIAL_STD)


def sparse_product(
    values: Float[Tensor, "n k"], columns: Int[Tensor, "n k"], weight: Float[Tensor, "f d"]
) -> Float[Tensor, "n d"]:
    """y_i = sum_k values_ik weight[columns_ik], without a gradient of the values."""
    y: Tensor = _SparseProduct.call(values.detach(), columns, weight)
    return y


class _SparseProduct(HandwrittenGradient):
    """torch's own gradient of `embedding_bag` sorts the columns anew in each step."""

    has_second_derivative = True

    @staticmethod
    def forward(ctx: Any, values: Tensor, columns: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(values, columns)
        ctx.features = len(weight)
        return F.embedding_bag(columns, weight, per_sample_weights=values, mode="sum")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:
        values, columns = ctx.saved_tensors
        # dropout and padding leave zeros, which need no product
        rows, slots = values.nonzero(as_tuple=True)
        messages = gradient.index_select(0, rows).mul_(values[rows, slots][:, None])
        weight_gradient = gradient.new_zeros(ctx.features, gradient.shape[1])
        return None, None, weight_gradient.index_add_(0, columns[rows, slots], messages)

    @classmethod
    def plain(cls, *arguments: Any) -> Any:
        values, columns, weight = arguments
        return (values[..., None] * F.embedding(columns, weight)).sum(1)


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
