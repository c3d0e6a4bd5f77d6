"""Operations over edges equal loops over the edges of each node, gradients too."""

import torch
from torch import Tensor

from graph_loops import NODES, sorted_edges
from manyformer.models.graph_embedding import sparse_product
from manyformer.nn.graphs import edge_softmax, sum_over_edges


def edge_indices(node: int, targets: Tensor) -> Tensor:
    return (targets == node).nonzero()[:, 0]


def test_the_softmax_is_that_of_the_edges_of_each_node() -> None:
    edges = sorted_edges(self_loops=False)
    # differences that a softmax without the maximum would not survive
    scores = torch.randn(len(edges.targets), 3, dtype=torch.float64) * 500
    weights = edge_softmax(scores, edges)
    for node in range(NODES):
        index = edge_indices(node, edges.targets)
        torch.testing.assert_close(weights[index], scores[index].softmax(0))


def test_sums_are_those_of_the_edges_of_each_node_and_zero_without_edges() -> None:
    edges = sorted_edges(self_loops=False)
    weights, values = torch.randn(len(edges.targets), 2).double(), torch.randn(NODES, 2, 4).double()
    sums = sum_over_edges(weights, values, edges)
    for node in range(NODES):
        index = edge_indices(node, edges.targets)
        expected = (weights[index][..., None] * values[edges.sources[index]]).sum(0)
        torch.testing.assert_close(sums[node], expected)
    assert not sums[3].any()


def test_gradients_are_right() -> None:
    edges = sorted_edges(self_loops=True)
    scores = torch.randn(len(edges.targets), 2, dtype=torch.float64, requires_grad=True)
    values = torch.randn(NODES, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s, v: sum_over_edges(edge_softmax(s, edges), v, edges), (scores, values))


def test_rows_point_to_the_edges_of_a_node() -> None:
    edges = sorted_edges(self_loops=True)
    for node in range(NODES):
        start, stop = edges.row_starts[node : node + 2].tolist()
        assert edges.targets[start:stop].unique().tolist() == [node]


def test_a_sparse_product_is_the_dense_one() -> None:
    columns = torch.tensor([[0, 3], [2, 0], [1, 4]])
    values = torch.tensor([[1.0, 2.0], [3.0, 0.0], [-1.0, 0.5]]).double()
    weight = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    dense = torch.zeros(3, 5).double().scatter_add_(1, columns, values)
    torch.testing.assert_close(sparse_product(values, columns, weight), dense @ weight)
    assert torch.autograd.gradcheck(lambda w: sparse_product(values, columns, w), (weight,))
