"""Layers over graphs equal loops over the neighbours of each node."""

from typing import Any

import networkx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from graph_loops import EDGES, NODES, attention_loop, sorted_edges, sources_of
from manyformer.nn.core import Context, TokenPositions, contiguous_positions
from manyformer.nn.graphs import (
    AdditiveScores,
    DynamicScores,
    GraphAttention,
    GraphConvolution,
    GraphTransformerStack,
)

HEADS, WIDTH = 2, 3


def positions(*, self_loops: bool = True) -> TokenPositions:
    plain = contiguous_positions(1, 0, NODES, torch.device("cpu"))
    return plain._replace(edges=sorted_edges(self_loops=self_loops))


def test_additive_attention_is_that_of_the_paper() -> None:
    scores = AdditiveScores(HEADS, WIDTH).double()
    x = torch.randn(1, NODES, HEADS * WIDTH, dtype=torch.float64, requires_grad=True)
    layer = GraphAttention(HEADS, WIDTH, scores).double()
    expected = attention_loop(x.view(NODES, HEADS, WIDTH), scores.source, scores.target)
    y = layer(x, Context(positions())).y
    torch.testing.assert_close(y, expected.view(1, NODES, -1))
    weight = torch.randn_like(y)
    inputs = (x, scores.source, scores.target)
    for actual, wanted in zip(
        torch.autograd.grad((y * weight).sum(), inputs),
        torch.autograd.grad((expected.view_as(y) * weight).sum(), inputs),
    ):
        torch.testing.assert_close(actual, wanted)


def test_heads_of_the_last_layer_are_averaged() -> None:
    scores = AdditiveScores(HEADS, WIDTH)
    x = torch.randn(1, NODES, HEADS * WIDTH)
    layer = GraphAttention(HEADS, WIDTH, scores, merge="mean")
    expected = attention_loop(x.view(NODES, HEADS, WIDTH), scores.source, scores.target).mean(1)
    torch.testing.assert_close(layer(x, Context(positions())).y[0], expected)


def test_dynamic_attention_is_that_of_gatv2() -> None:
    scores = DynamicScores(HEADS, WIDTH).double()
    x = torch.randn(1, NODES, 2 * HEADS * WIDTH, dtype=torch.float64)
    target, source = x.view(NODES, HEADS, 2, WIDTH).unbind(2)
    y = GraphAttention(HEADS, WIDTH, scores).double()(x, Context(positions())).y.view(NODES, HEADS, WIDTH)
    for node in range(NODES):
        for head in range(HEADS):
            neighbours = sources_of(node)
            sums = [scores.vector[head] @ F.leaky_relu(target[node, head] + source[j, head], 0.2) for j in neighbours]
            weights = torch.stack(sums).softmax(0)
            torch.testing.assert_close(y[node, head], weights @ source[neighbours, head])


def test_the_graph_transformer_is_that_of_the_paper() -> None:
    """Equations 8 to 12 for the first layer of two, in loops over the edges."""
    dim, count = HEADS * WIDTH, 2
    stack = GraphTransformerStack(2, dim, HEADS, edge_features=count, ff_dim=5).double()
    edges = sorted_edges(self_loops=False)._replace(features=torch.randn(len(EDGES), count).double())
    ctx = Context(positions()._replace(edges=edges))
    assert stack.edge_embed is not None
    assert edges.features is not None
    first, (x, e) = stack.layers[0], (torch.randn(NODES, dim).double(), stack.edge_embed(edges.features))
    q, k, v = first.projection(x).view(NODES, 3, HEADS, WIDTH).unbind(1)
    projected = first.edge_projection(e).view(-1, HEADS, WIDTH)
    ends = list(zip(edges.sources.tolist(), edges.targets.tolist()))
    products = torch.stack([q[i] * k[j] * projected[n] / WIDTH**0.5 for n, (j, i) in enumerate(ends)])
    attended = torch.zeros(NODES, HEADS, WIDTH).double()
    for node in range(NODES):
        incoming = [n for n, (_, target) in enumerate(ends) if target == node]
        for head in range(HEADS if incoming else 0):
            weights = products[incoming, head].sum(-1).softmax(0)
            attended[node, head] = sum(w * v[ends[n][0], head] for w, n in zip(weights, incoming))

    def update(part: Any, stream: Tensor, value: Tensor) -> Tensor:
        stream = part.norm(stream + part.out_proj(value.flatten(1)))
        return part.ff_norm(stream + part.ff(stream))

    nodes, stream = first(x, e, edges, ctx)
    torch.testing.assert_close(nodes, update(first.node_update, x, attended))
    torch.testing.assert_close(stream, update(first.edge_update, e, products))
    torch.testing.assert_close(stack(x[None], ctx).y[0], stack.layers[1](nodes, stream, edges, ctx)[0])
    with pytest.raises(ValueError, match="reads features of edges, and the edges have none"):
        stack(x[None], Context(positions(self_loops=False)))


@pytest.mark.oracle
def test_a_convolution_is_a_product_with_the_matrix_of_networkx() -> None:
    graph = networkx.Graph([*EDGES, *((node, node) for node in range(NODES))])
    matrix = torch.from_numpy(networkx.to_numpy_array(graph, nodelist=range(NODES)))
    both_ways = [(source, target) for source, target in graph.edges] + [(t, s) for s, t in graph.edges]
    degrees = matrix.sum(1)
    x = torch.randn(1, NODES, 4, dtype=torch.float64)
    edges = sorted_edges(self_loops=True, edges=both_ways)
    y = GraphConvolution(4).double()(x, Context(positions()._replace(edges=edges))).y
    expected = (matrix / (degrees[:, None] * degrees).sqrt()) @ x[0]
    torch.testing.assert_close(y[0], expected)


def test_layers_need_edges() -> None:
    plain: TokenPositions = contiguous_positions(1, 0, NODES, torch.device("cpu"))
    x: Tensor = torch.randn(1, NODES, HEADS * WIDTH)
    for layer in (GraphAttention(HEADS, WIDTH, AdditiveScores(HEADS, WIDTH)), GraphConvolution(HEADS * WIDTH)):
        with pytest.raises(ValueError, match="needs the edges of a graph"):
            layer(x, Context(plain))
