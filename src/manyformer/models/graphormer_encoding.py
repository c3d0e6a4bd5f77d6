"""The structural encodings of Graphormer: degrees of nodes, shortest paths between them, and a virtual node."""

from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import Context
from manyformer.models.token_positions import positions_of
from manyformer.ops.graph_distances import NO_PATH, graph_distances, mean_along_shortest_paths
from manyformer.structures import GraphEdges
from manyformer.training_hooks import UndecayedParameters

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
            segments = F.pad(positions.segment_ids, (1, 0))
            positions, _ = positions_of(segments, segments, None)
            is_real = F.pad(torch.ones_like(scores[:, :, :1], dtype=torch.bool), (1, 0, 0, 0, 1, 0))
            scores = torch.where(is_real, F.pad(scores, (1, 0, 0, 0, 1, 0)), self.virtual_score[:, None])
        return x, Context(positions._replace(pair_scores=scores), watch=ctx.watch)

    def _centrality(self, edges: GraphEdges) -> Float[Tensor, "nodes d"]:
        nodes = len(edges.row_starts) - 1
        out_degrees = torch.zeros(nodes, dtype=torch.long, device=edges.sources.device)
        out_degrees = out_degrees.index_add(0, edges.sources, torch.ones_like(edges.sources))
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
        by_target: Float[Tensor, "b j i h"] = scores.view(rows, length, length, scores.shape[-1])
        return by_target.permute(0, 2, 3, 1)


def _normal(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * INITIAL_STD)
