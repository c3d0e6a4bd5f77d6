"""Models of graphs: the order of nodes, graphs in one row, and edges that are none."""

from typing import Any

import pytest
import torch
from torch import Tensor

import manyformer as mf
from manyformer.check.tiny_models import build_tiny
from manyformer.errors import UserError
from manyformer.models import Model
from manyformer.models.graph_edges import sort_edges
from manyformer.recipes import RECIPES
from manyformer.tasks.drawn_graphs import edges_of_tokens

GRAPH_RECIPES = sorted(name for name, recipe in RECIPES.items() if "graphs" in recipe.card.task.data_forms)
NODES = 7


def model_of(name: str, **keywords: Any) -> Model:
    return build_tiny(name, keywords, 0).double().eval()


def drawn_graph(nodes: int = NODES) -> tuple[Tensor, Tensor]:
    """Features, and edges in both directions."""
    return torch.randn(1, nodes, 6).double(), edges_of_tokens(torch.randint(29, (1, nodes)), None)


@pytest.mark.parametrize("name", GRAPH_RECIPES)
def test_another_order_of_the_nodes_is_another_order_of_the_outputs(name: str) -> None:
    model = model_of(name)
    features, edges = drawn_graph()
    order = torch.randperm(NODES)
    numbers = order.argsort()
    moved = torch.where(edges < 0, edges, numbers[edges.clamp(min=0)])
    expected = model(features, edges).logits
    actual = model(features[:, order], moved.flip(1)).logits
    torch.testing.assert_close(actual, expected[:, order] if expected.ndim == 3 else expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", GRAPH_RECIPES)
def test_a_graph_of_a_row_depends_on_no_other(name: str) -> None:
    if "packing" in RECIPES[name].card.task.reasons:
        pytest.skip("a row is one graph")
    model = model_of(name)
    (features, edges), (others, other_edges) = drawn_graph(), drawn_graph(5)
    together = torch.cat([features, others], 1).requires_grad_()
    shifted = torch.where(other_edges < 0, other_edges, other_edges + NODES)
    segments = torch.tensor([[0] * NODES + [1] * 5])
    logits = model(together, torch.cat([edges, shifted], 1), segments).logits
    torch.testing.assert_close(logits[:, :NODES], model(features, edges).logits)
    torch.testing.assert_close(logits[:, NODES:], model(others, other_edges).logits)
    (gradient,) = torch.autograd.grad(logits[:, :NODES].square().sum(), together)
    assert gradient[:, :NODES].abs().sum(-1).all()
    assert not gradient[:, NODES:].any()


def test_sparse_features_are_those_with_zeros_between() -> None:
    model = model_of("gat")
    features, edges = drawn_graph()
    columns = torch.tensor([0, 3, 5]).expand(1, NODES, -1)
    dense = torch.zeros_like(features).scatter(2, columns, features[..., :3])
    expected = model(dense, edges).logits
    torch.testing.assert_close(model(features[..., :3], edges, None, columns).logits, expected)
    with pytest.raises(UserError, match=r"columns of sparse features are 0 to 6, but .* features=6"):
        model(features[..., :3], edges, None, columns.where(columns < 5, 6))
    with pytest.raises(UserError, match=r"a node has 3 features, but .* features=6"):
        model(features[..., :3], edges)


@pytest.mark.parametrize(
    ("edge", "message"),
    [
        ((0, 7), "edge 1 of row 0 is from node 0 to 7, and nodes are 0 to 6"),
        ((-1, 3), "edge 1 of row 0 is from node -1 to 3, and nodes are 0 to 6"),
        ((0, 4), "edge 1 of row 0 is from node 0 to 4, and these are not nodes of one graph"),
        ((6, 6), "edge 1 of row 0 is from node 6 to 6, and these are not nodes of one graph"),
    ],
)
def test_an_edge_of_a_node_that_is_not_there_is_named(edge: tuple[int, int], message: str) -> None:
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, -1]])
    with pytest.raises(UserError, match=message):
        sort_edges(torch.tensor([[(0, 1), edge]]), segments, self_loops=False)


def test_a_loop_is_not_counted_twice() -> None:
    edges = sort_edges(torch.tensor([[(0, 0), (1, 0), (-1, -1)]]), torch.zeros(1, 2).long(), self_loops=True)
    assert list(zip(edges.sources.tolist(), edges.targets.tolist())) == [(1, 0), (0, 0), (1, 1)]
    with pytest.raises(ValueError, match="have features, but those that join each node with itself have none"):
        sort_edges(torch.zeros(1, 1, 2).long(), torch.zeros(1, 2).long(), torch.zeros(1, 1, 3), self_loops=True)


def test_the_scores_of_gatv2_are_a_keyword() -> None:
    features, edges = drawn_graph()
    model = model_of("gat", scores="dynamic", output_heads=2)
    assert model(features, edges).logits.shape == (1, NODES, 3)
    report = mf.check(model, only=["padding-right", "packing", "gradients"])
    assert report.ok
