"""The encodings of Graphormer: scores and degrees against loops over the nodes, and the virtual node."""

import itertools
from typing import Any

import networkx
import pytest
import torch
from torch import Tensor

from manyformer.analysis.own_models import build_tiny
from manyformer.models.graph_embedding import GraphormerEncoding, sort_edges
from manyformer.nn.core import Context, contiguous_positions
from manyformer.nn.positions.content_positions import GraphPairPosition

EDGES = [(0, 1), (1, 2), (2, 3), (0, 4), (4, 3), (3, 5), (5, 5)]
NODES, DIM, HEADS = 7, 8, 2


def encode(*, virtual_node: bool, **keywords: Any) -> tuple[GraphormerEncoding, Tensor, Tensor]:
    """The encoding, its nodes and its scores for a directed graph with an isolated node and two equally short paths."""
    encoding = GraphormerEncoding(
        DIM, HEADS, **{"max_degree": 2, "max_distance": 2, "edge_features": 3, **keywords}, virtual_node=virtual_node
    ).double()
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.normal_()
    features = torch.randn(1, len(EDGES), 3, dtype=torch.float64)
    positions = contiguous_positions(1, 0, NODES, torch.device("cpu"))
    edges = sort_edges(torch.tensor([EDGES]), positions.segment_ids, features, self_loops=False)
    encoding.register_buffer("drawn", features)
    x, ctx = encoding(torch.zeros(1, NODES, DIM).double(), Context(positions._replace(edges=edges)))
    assert ctx.positions.pair_scores is not None
    return encoding, x, ctx.positions.pair_scores


def test_scores_are_a_number_of_the_distance_and_a_mean_along_the_paths() -> None:
    encoding, x, scores = encode(virtual_node=False)
    assert encoding.path is not None
    graph = networkx.DiGraph(EDGES)
    graph.add_node(6)
    features = encoding.get_buffer("drawn")[0]
    lengths = dict(networkx.all_pairs_shortest_path_length(graph))
    for i in range(NODES):
        for j in range(NODES):
            distance = lengths[i].get(j, 9)
            expected = encoding.distance.weight[distance if distance <= 2 else 3]
            if 1 <= distance <= 2:
                paths = list(networkx.all_shortest_paths(graph, i, j))
                for path in paths:
                    for hop, pair in enumerate(itertools.pairwise(path)):
                        term = features[EDGES.index(pair)] @ encoding.path[hop]
                        expected = expected + term / (distance * len(paths))
            torch.testing.assert_close(scores[0, i, :, j], expected)
    # in-degrees and out-degrees, of which 3 would count as 2
    in_degrees, out_degrees = [0, 1, 1, 2, 1, 2, 0], [2, 1, 1, 1, 1, 1, 0]
    torch.testing.assert_close(x[0], encoding.in_degree.weight[in_degrees] + encoding.out_degree.weight[out_degrees])


def test_degrees_beyond_the_largest_share_its_vector() -> None:
    encoding, x, _ = encode(virtual_node=False, max_degree=1)
    assert torch.equal(x[0, 0], encoding.in_degree.weight[0] + encoding.out_degree.weight[1])


def test_a_virtual_node_comes_first_and_is_joined_with_all() -> None:
    encoding, x, scores = encode(virtual_node=True)
    assert encoding.virtual_node is not None
    assert encoding.virtual_score is not None
    assert x.shape == (1, NODES + 1, DIM)
    assert torch.equal(x[0, 0], encoding.virtual_node[0, 0])
    assert torch.equal(scores[0, 0], encoding.virtual_score[:, None].expand(-1, NODES + 1))
    assert torch.equal(scores[0, :, :, 0], encoding.virtual_score.expand(NODES + 1, -1))
    assert torch.equal(scores[0, 1, :, 1], encoding.distance.weight[0])


def test_the_label_of_a_graph_is_that_of_its_virtual_node() -> None:
    model = build_tiny("graphormer-classifier", {}, 0).eval()
    features, edges = torch.randn(2, 5, 6), torch.tensor([[(0, 1), (1, 2)], [(3, 4), (-1, -1)]])
    edge_features = torch.randn(2, 2, 2)
    logits = model(features, edges, None, None, edge_features).logits
    with torch.no_grad():
        model.encoding.virtual_node += torch.arange(16)
    assert not torch.allclose(model(features, edges, None, None, edge_features).logits, logits)


def test_distances_below_one_edge_and_scores_without_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"max_distance \(0\) must be at least 1 edge"):
        GraphormerEncoding(8, 2, max_degree=1, max_distance=0, edge_features=0, virtual_node=False)
    positions = contiguous_positions(1, 0, 3, torch.device("cpu"))
    logits = torch.zeros(1, 2, 3, 3)
    with pytest.raises(ValueError, match="needs the scores of pairs of nodes, which GraphormerEncoding computes"):
        GraphPairPosition(2).score(logits, logits, logits, positions, positions)
