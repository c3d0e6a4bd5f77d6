"""Distances and means along shortest paths against networkx, which lists all shortest paths one by one."""

import itertools

import networkx
import pytest
import torch

from manyformer.models.graph_embedding import graph_distances, mean_along_shortest_paths, sort_edges
from manyformer.nn.core import GraphEdges

NODES, ROWS = 9, 3


def drawn_graphs(directed_edges: int) -> tuple[list[networkx.DiGraph], GraphEdges]:
    """Random directed graphs, one to a row, with loops and several shortest paths, and features of their edges."""
    graphs, rows = [], []
    for _ in range(ROWS):
        pairs = torch.randint(NODES, (directed_edges, 2)).unique(dim=0)
        graph = networkx.DiGraph()
        graph.add_nodes_from(range(NODES))
        graph.add_edges_from(map(tuple, pairs.tolist()))
        graphs.append(graph)
        rows.append(torch.cat([pairs, torch.full((directed_edges - len(pairs), 2), -1)]))
    edges = torch.stack(rows)
    features = torch.randn(ROWS, directed_edges, 2, dtype=torch.float64)
    return graphs, sort_edges(edges, torch.zeros(ROWS, NODES).long(), features, self_loops=False)


def edge_number(edges: GraphEdges, row: int, source: int, target: int) -> int:
    pairs = zip(edges.sources.tolist(), edges.targets.tolist())
    return list(pairs).index((row * NODES + source, row * NODES + target))


@pytest.mark.parametrize("directed_edges", [8, 14, 30])
@pytest.mark.parametrize("limit", [1, 3, 8])
def test_distances_and_means_are_those_of_networkx(directed_edges: int, limit: int) -> None:
    graphs, edges = drawn_graphs(directed_edges)
    assert edges.features is not None
    weights = torch.randn(limit, 2, 2, dtype=torch.float64, requires_grad=True)
    terms = edges.features @ weights
    distances = graph_distances(edges, NODES, limit)
    means = mean_along_shortest_paths(terms, distances, edges)
    expected_means = torch.zeros_like(means)
    for row, graph in enumerate(graphs):
        for source in range(NODES):
            for target in range(NODES):
                entry = row * NODES + target, source
                joined = networkx.has_path(graph, source, target)
                paths = list(networkx.all_shortest_paths(graph, source, target)) if joined else []
                hops = len(paths[0]) - 1 if paths else limit + 1
                assert distances[entry] == (hops if hops <= limit else -1)
                if 1 <= hops <= limit:
                    along = [
                        torch.stack(
                            [
                                terms[hop, edge_number(edges, row, *pair)]
                                for hop, pair in enumerate(itertools.pairwise(path))
                            ]
                        ).mean(0)
                        for path in paths
                    ]
                    expected_means[entry] = torch.stack(along).mean(0)
    torch.testing.assert_close(means, expected_means)
    (gradient,) = torch.autograd.grad(means.square().sum(), weights, retain_graph=True)
    (expected,) = torch.autograd.grad(expected_means.square().sum(), weights)
    torch.testing.assert_close(gradient, expected)


def test_a_graph_without_edges_has_distances_to_itself_alone() -> None:
    edges = sort_edges(torch.zeros(2, 0, 2).long(), torch.zeros(2, 3).long(), self_loops=False)
    assert torch.equal(graph_distances(edges, 3, 4), torch.eye(3).long().repeat(2, 1) - 1)
