"""Graphs in loops over their adjacency: what the fast operations must equal."""

import torch
import torch.nn.functional as F
from torch import Tensor

from manyformer.models.graph_embedding import sort_edges
from manyformer.nn.core import GraphEdges

EDGES = [(0, 1), (1, 0), (1, 2), (2, 1), (3, 1), (4, 2), (2, 4), (4, 4)]
"""Directed edges among six nodes: no edge ends at node 3, none begins or ends at node 5, node 4 has a loop."""
NODES = 6


def edges_tensor(edges: list[tuple[int, int]] = EDGES) -> Tensor:
    return torch.tensor(edges).view(1, -1, 2)


def sorted_edges(*, self_loops: bool, edges: list[tuple[int, int]] = EDGES) -> GraphEdges:
    return sort_edges(edges_tensor(edges), torch.zeros(1, NODES, dtype=torch.long), self_loops=self_loops)


def sources_of(node: int) -> list[int]:
    """The nodes that `node` attends to: those with an edge to it, and itself."""
    return sorted({source for source, target in EDGES if target == node} | {node})


def attention_loop(x: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """GAT for each node and head, from projected nodes (nodes, heads, e) and the two vectors of the scores."""
    rows = []
    for node in range(NODES):
        heads = []
        for head in range(x.shape[1]):
            neighbours = sources_of(node)
            scores = [F.leaky_relu(target[head] @ x[node, head] + source[head] @ x[j, head], 0.2) for j in neighbours]
            weights = torch.stack(scores).softmax(0)
            heads.append(sum(weight * x[j, head] for weight, j in zip(weights, neighbours)))
        rows.append(torch.stack(heads))  # type: ignore[arg-type]
    return torch.stack(rows)
