"""Batches that list on the host which of their entries a model reads, so that no GPU is asked for their number."""

from typing import Any

import pytest
import torch
from torch import Tensor

from manyformer.analysis.own_models import build_tiny
from manyformer.models.graph_embedding import EdgePlaces, sort_edges
from manyformer.models.tasks import Inputs
from manyformer.nn.batches import IGNORE_INDEX, GraphBatch, MaskedLMBatch, ModalitiesBatch
from manyformer.nn.batches.batch import ListsPlaces, scored_places, to_device
from manyformer.recipes.parts.registry import task_of

TOKENS = 40
EDGES = torch.tensor([[[0, 1], [1, 1], [2, 0], [-1, -1]], [[2, 2], [0, 2], [-1, -1], [-1, -1]]])


def drawn(recipe: str, **keywords: Any) -> tuple[Any, Any]:
    """A model in float64 with a batch of which most targets are ignored."""
    model = build_tiny(recipe, keywords, 0).double().train()
    task: Any = task_of(model)
    length = task.fixed_length(model) or TOKENS
    inputs = task.example(model, torch.randint(5, 20, (2, length)))
    targets = task.random_targets(model, inputs, torch.Generator().manual_seed(0))
    if targets.dim() == 2:
        targets = targets.where(torch.rand(targets.shape) < 0.2, IGNORE_INDEX)
    batch = task.batch(model, Inputs(inputs.tokens, inputs.segments), targets)
    fields = (part.double() if part is not None and part.is_floating_point() else part for part in batch)
    return model, type(batch)(*fields)


def loss_and_gradients(model: Any, batch: Any) -> list[Tensor]:
    torch.manual_seed(0)
    loss = model.loss(batch)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    return [loss.total, loss.targets, *torch.autograd.grad(loss.total, weights, allow_unused=True)]


@pytest.mark.parametrize("recipe", ["bert", "structural", "gcn", "gat", "graphormer", "graph-transformer", "clip"])
def test_listed_places_change_neither_loss_nor_gradient(recipe: str) -> None:
    model, batch = drawn(recipe)
    assert isinstance(batch, ListsPlaces)
    for actual, expected in zip(
        loss_and_gradients(model, batch.with_places()), loss_and_gradients(model, batch), strict=True
    ):
        torch.testing.assert_close(actual, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("tokens", [0, 1, 31, 32, 33, 1000])
@pytest.mark.parametrize("share", [0.0, 0.15, 1.0])
def test_every_token_with_a_target_is_listed_once_and_few_others(tokens: int, share: float) -> None:
    targets = torch.full((1, tokens), IGNORE_INDEX).where(torch.rand(1, tokens) >= share, 7)
    places = scored_places(targets)
    scored = (targets[0] != IGNORE_INDEX).nonzero()[:, 0]
    assert places[: len(scored)].tolist() == scored.tolist()
    assert len(places.unique()) == len(places) <= min(tokens, len(scored) + max(1, tokens // 32))


def test_a_batch_lists_them_as_it_leaves_the_host_and_not_before() -> None:
    tokens = torch.randint(5, 20, (2, TOKENS))
    batch = MaskedLMBatch(tokens, tokens.masked_fill(tokens < 15, IGNORE_INDEX))
    assert to_device(batch, torch.device("cpu")) is batch
    assert batch.scored is None
    assert batch.with_places().scored is not None


@pytest.mark.parametrize("self_loops", [False, True])
def test_listed_edges_are_sorted_as_all_edges_are(self_loops: bool) -> None:
    segments = torch.zeros(2, 3, dtype=torch.long)
    features = None if self_loops else torch.randn(2, 4, 5)
    batch = GraphBatch(torch.zeros(2, 3, 1), EDGES, torch.zeros(2, 3, dtype=torch.long)).with_places()
    assert batch.links is not None
    assert batch.loops is not None
    assert batch.links.tolist() == [0, 2, 5]
    assert batch.loops.tolist() == [1, 4]
    places = EdgePlaces(batch.links, batch.loops)
    actual = sort_edges(EDGES, segments, features, self_loops=self_loops, places=places)
    expected = sort_edges(EDGES, segments, features, self_loops=self_loops)
    assert sorted(zip(actual.targets.tolist(), actual.sources.tolist())) == sorted(
        zip(expected.targets.tolist(), expected.sources.tolist())
    )
    assert torch.equal(actual.targets, expected.targets)
    assert torch.equal(actual.row_starts, expected.row_starts)
    if actual.features is not None and expected.features is not None:
        by_source = [
            edges.features[(edges.targets * 6 + edges.sources).argsort()]  # type: ignore[index]
            for edges in (actual, expected)
        ]
        assert torch.equal(*by_source)


def test_rows_that_are_ignored_later_are_listed_no_more() -> None:
    batch = ModalitiesBatch(torch.tensor([0, IGNORE_INDEX, 1])).with_places()
    assert batch.scored is not None
    assert batch.scored.tolist() == [0, 2]
    assert batch.ignored().scored is None
