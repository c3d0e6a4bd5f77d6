"""Models of graphs: the order of nodes, graphs in one row, and edges that are none."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import manyformer as mf
from manyformer.analysis.own_models import build_tiny
from manyformer.base.errors import UserError
from manyformer.models import GraphClassifier, Model, NodeClassifier
from manyformer.models.graph_embedding import sort_edges
from manyformer.models.tasks import Inputs
from manyformer.models.tasks.graph_labels import batch_of_tokens, edges_of_tokens
from manyformer.nn.batches import GraphBatch
from manyformer.nn.structures import laplacian_eigenvectors
from manyformer.recipes import RECIPES

GRAPH_RECIPES = sorted(name for name, recipe in RECIPES.items() if "graphs" in recipe.card.task.data_forms)
NODES = 7
SIGNS = [(a, b, c) for a in (-1, 1) for b in (-1, 1) for c in (-1, 1)]


def model_of(name: str, **keywords: Any) -> Model:
    return build_tiny(name, keywords, 0).double().eval()


def drawn_batch(model: Any, nodes: int) -> GraphBatch:
    """A graph with all that the model reads, in float64."""
    batch = batch_of_tokens(model, Inputs(torch.randint(29, (1, nodes))), torch.zeros(1, nodes))
    return GraphBatch(*(part.double() if part is not None and part.is_floating_point() else part for part in batch))


def logits_of(model: Model, batch: GraphBatch) -> Tensor:
    logits: Tensor = model(*batch.inputs).logits
    return logits


def drawn_graph(nodes: int = NODES) -> tuple[Tensor, Tensor]:
    """Features, and edges in both directions."""
    return torch.randn(1, nodes, 6).double(), edges_of_tokens(torch.randint(29, (1, nodes)), None)


def join(batch: GraphBatch, other: GraphBatch) -> GraphBatch:
    """Both graphs in one row."""
    nodes = batch.features.shape[1]
    moved = other._replace(edges=torch.where(other.edges < 0, other.edges, other.edges + nodes))
    pairs = zip(batch, moved)
    joined = GraphBatch(*(None if part is None else torch.cat([part, more], 1) for part, more in pairs))
    return joined._replace(segments=torch.tensor([[0] * nodes + [1] * other.features.shape[1]]))


@pytest.mark.parametrize("name", GRAPH_RECIPES)
def test_another_order_of_the_nodes_is_another_order_of_the_outputs(name: str) -> None:
    model = model_of(name)
    batch = drawn_batch(model, NODES)
    order = torch.randperm(NODES)
    numbers = order.argsort()
    moved = batch._replace(
        features=batch.features[:, order],
        # in reverse, as the order of the edges must not matter either
        edges=torch.where(batch.edges < 0, batch.edges, numbers[batch.edges.clamp(min=0)]).flip(1),
        edge_features=None if batch.edge_features is None else batch.edge_features.flip(1),
        eigenvectors=None if batch.eigenvectors is None else batch.eigenvectors[:, order],
    )
    expected, actual = logits_of(model, batch), logits_of(model, moved)
    torch.testing.assert_close(actual, expected[:, order] if expected.ndim == 3 else expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", GRAPH_RECIPES)
def test_a_graph_of_a_row_depends_on_no_other(name: str) -> None:
    if "packing" in RECIPES[name].card.task.reasons:
        pytest.skip("a row is one graph")
    model = model_of(name)
    batch, other = drawn_batch(model, NODES), drawn_batch(model, 5)
    together = join(batch, other)
    features = together.features.requires_grad_()
    logits = logits_of(model, together)
    torch.testing.assert_close(logits[:, :NODES], logits_of(model, batch))
    torch.testing.assert_close(logits[:, NODES:], logits_of(model, other))
    (gradient,) = torch.autograd.grad(logits[:, :NODES].square().sum(), features)
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


def test_inputs_that_a_model_does_not_read_are_refused() -> None:
    features, edges = drawn_graph()
    with pytest.raises(UserError, match=r"built with edge_features=0, and is given 2 numbers"):
        model_of("gat")(features, edges, None, None, torch.zeros(1, edges.shape[1], 2))
    with pytest.raises(UserError, match=r"built with laplacian=3, and is given 0 numbers"):
        model_of("graph-transformer")(features, edges)


def test_the_label_of_a_graph_is_that_of_the_mean_over_its_nodes() -> None:
    model = model_of("graph-transformer-classifier")
    assert isinstance(model, GraphClassifier)
    batch = drawn_batch(model, NODES)
    nodes = NodeClassifier(
        model.embed, model.body, model.head, self_loops=False, edge_features=2, positions=model.positions
    )
    torch.testing.assert_close(logits_of(model, batch), logits_of(nodes, batch).mean(1))


def test_signs_of_positions_are_drawn_in_training_alone() -> None:
    model = model_of("graph-transformer")
    batch = drawn_batch(model, NODES)
    assert torch.equal(logits_of(model, batch), logits_of(model, batch))
    mirrored = [batch._replace(eigenvectors=batch.eigenvectors * torch.tensor(signs)) for signs in SIGNS]  # type: ignore[operator]
    expected = [logits_of(model, part) for part in mirrored]
    model.train()
    drawn = [logits_of(model, batch) for _ in range(40)]
    matches = {index for y in drawn for index, part in enumerate(expected) if torch.allclose(y, part)}
    assert all(any(torch.allclose(y, part) for part in expected) for y in drawn)
    assert len(matches) == len(SIGNS)


def test_laplacian_positions_of_a_cycle_are_waves() -> None:
    """The eigenvalues of a cycle are 1 - cos(2 pi k / n), each twice but for the first and the last."""
    nodes = 6
    edges = np.stack([np.arange(nodes), (np.arange(nodes) + 1) % nodes], 1)
    vectors = laplacian_eigenvectors(edges, nodes, 8).astype(np.float64)
    assert vectors.shape == (nodes, 8)
    assert not vectors[:, 5:].any()
    neighbours = (np.roll(vectors, 1, 0) + np.roll(vectors, -1, 0))[:, :5] / 2
    cosines = np.cos(2 * np.pi * np.array([1, 1, 2, 2, 3]) / nodes)
    np.testing.assert_allclose(neighbours, vectors[:, :5] * cosines, atol=1e-6)
