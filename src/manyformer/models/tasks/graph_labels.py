"""The tasks of assigning a label to each node of graphs, or to each graph; in contracts token ids stand for nodes."""

import math
from collections.abc import Mapping
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import TypeVar

from manyformer.models import GraphClassifier, NodeClassifier
from manyformer.models.graph_encoder import GraphEncoder
from manyformer.models.scores import ScoreKind
from manyformer.models.tasks.label_task import BatchLabelTask
from manyformer.models.tasks.requests import TaskTokenizers, TextPass
from manyformer.models.tasks.toy import FIRST_SYMBOL, PERIOD, STAND_IN_IDS, SYMBOLS, Toy, ToyDraw, stand_in_vectors
from manyformer.nn.batches import Batch, GraphBatch, to_device
from manyformer.nn.core import PADDING_SEGMENT
from manyformer.nn.model_inputs import Inputs
from manyformer.nn.runtime.torch_internals import compiler_disabled
from manyformer.nn.structures import laplacian_eigenvectors

GraphModelT = TypeVar("GraphModelT", bound=GraphEncoder, default=Any)
"""The model class of a task."""


class GraphLabelTask(BatchLabelTask[GraphModelT]):
    """Assigns labels to nodes or to graphs; drawn tokens get edges that are derived from them."""

    reasons: Mapping[str, str] = {
        "causal": "a node depends on its neighbours, wherever in the row they are",
        "incremental_decoding": "a later node changes its neighbours, so no state can be cached",
        "cross_attention": "it reads one graph only",
    }
    # graphs come from archives with labels, which there is no command to predict for
    command = "evaluate"

    def token_ids(self, model: GraphModelT) -> int:
        return STAND_IN_IDS

    def arguments(self, model: GraphModelT, inputs: Inputs) -> tuple[Any, ...]:
        # targets do not matter here, and tokens have their shape
        return self.batch(model, inputs, inputs.tokens).inputs

    def batch(self, model: GraphModelT, inputs: Inputs, targets: Tensor) -> GraphBatch:
        return batch_of_tokens(model, inputs, targets)

    def read(self, model: GraphModelT, batch: GraphBatch) -> tuple[Tensor, Tensor]:
        return model(*batch.inputs).logits, batch.targets

    def example_pass(self, model: GraphModelT, batch: Batch, tokenizers: TaskTokenizers) -> TextPass:
        """The nodes of the first row of graphs, as numbers."""
        assert isinstance(batch, GraphBatch)
        moved: Any = to_device(batch, model.device)
        row = [None if part is None else part[:1] for part in moved.inputs]
        length = moved.features.shape[1]
        if moved.segments is None:
            count = length
        else:
            count = int((moved.segments[0] >= 0).sum())
        labels = tuple(f"node {number}" for number in range(count))
        return TextPass(lambda watch: model(*row, watch=watch), labels, length)


@final
class GraphNodes(GraphLabelTask[NodeClassifier]):
    """Assigns a label to each node."""

    name = "graph-nodes"
    title = "labelling nodes of graphs"
    model = NodeClassifier
    data_forms: Mapping[str, str] = {"graphs": "nodes"}
    score_kinds: Mapping[str, ScoreKind] = {"macro_f1": ScoreKind("%")}
    per_token = True
    nouns = "nodes"

    def toy(self, model: NodeClassifier, draw: ToyDraw) -> Toy:
        """The label is whether most of a node and its two neighbours on a ring are in the upper half of the symbols."""
        tokens = draw.symbols(2 * PERIOD)
        is_upper = (tokens >= FIRST_SYMBOL + SYMBOLS // 2).long()
        targets = (is_upper + is_upper.roll(1, 1) + is_upper.roll(-1, 1) >= 2).long()
        return Toy(self.batch(model, Inputs(tokens), targets)._replace(edges=_rings(tokens)), math.log(2))


@final
class WholeGraphs(GraphLabelTask[GraphClassifier]):
    """Assigns one label to each graph."""

    name = "graphs"
    title = "labelling graphs"
    model = GraphClassifier
    data_forms: Mapping[str, str] = {"graphs": "graphs"}
    reasons: Mapping[str, str] = {
        **GraphLabelTask.reasons,
        "packing": "a row has one label, so it holds one graph",
        "per_token": "a graph has one label, its nodes have none",
    }
    nouns = "graphs"

    def toy(self, model: GraphClassifier, draw: ToyDraw) -> Toy:
        """Rings of equal nodes but for two, which are neighbours or opposite to each other: that is the label."""
        tokens = draw.symbols(2 * PERIOD).fill_(FIRST_SYMBOL)
        labels = torch.randint(2, (len(tokens),), generator=draw.generator).to(tokens.device)
        rows = torch.arange(len(tokens), device=tokens.device)
        tokens[:, 0] = FIRST_SYMBOL + 1
        tokens[rows, torch.where(labels == 1, 1, PERIOD)] = FIRST_SYMBOL + 2
        return Toy(self.batch(model, Inputs(tokens), labels)._replace(edges=_rings(tokens)), math.log(2))


def _rings(tokens: Int[Tensor, "b l"]) -> Int[Tensor, "b m 2"]:
    """Edges that join each token with both of its neighbours, the last one with the first."""
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    clockwise = torch.stack([columns, columns.roll(1)], -1)
    return torch.cat([clockwise, clockwise.flip(-1)]).expand(len(tokens), -1, -1)


def batch_of_tokens(model: GraphEncoder, inputs: Inputs, targets: Tensor) -> GraphBatch:
    """Graphs whose nodes have the features of their token ids, joined by edges that follow from the ids."""
    tokens = inputs.tokens
    segments = inputs.segments
    features = stand_in_vectors(torch.randn, model.embed.features, tokens.device)(tokens)
    edges = edges_of_tokens(tokens, segments)
    batch = GraphBatch(features, edges, targets, segments)
    if model.edge_features:
        ends = tokens.gather(1, edges.clamp(min=0).flatten(1)).view_as(edges)
        # not symmetric, so that both directions of an edge have different features
        edge_ids = (ends[..., 0] + 3 * ends[..., 1]) % STAND_IN_IDS
        batch = batch._replace(
            edge_features=stand_in_vectors(torch.randn, model.edge_features, tokens.device)(edge_ids)
        )
    if model.positions is not None:
        batch = batch._replace(eigenvectors=_eigenvectors(edges, segments, tokens, model.positions.count))
    return batch


def edges_of_tokens(tokens: Int[Tensor, "b l"], segments: Int[Tensor, "b l"] | None) -> Int[Tensor, "b m 2"]:
    """A tree for each document: each token but the first is joined, both ways, with an earlier one that its id names.

    The tokens of a document are adjacent."""
    columns = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    if segments is None:
        segments = torch.zeros_like(tokens)
    is_start = torch.ones_like(tokens, dtype=torch.bool)
    is_start[:, 1:] = segments[:, 1:] != segments[:, :-1]
    # the column at which the document of each token begins
    starts = torch.where(is_start, columns, 0).cummax(1).values
    positions = columns - starts
    # an earlier token of the same document, so that what is added behind it changes no edge
    parents = starts + tokens % positions.clamp(min=1)
    has_parent = (positions > 0) & (segments != PADDING_SEGMENT)
    upward = torch.stack([columns, parents], -1).masked_fill(~has_parent[..., None], -1)
    return torch.cat([upward, upward.flip(-1)], 1)


@compiler_disabled
def _eigenvectors(
    edges: Int[Tensor, "b m 2"], segments: Int[Tensor, "b l"] | None, tokens: Int[Tensor, "b l"], count: int
) -> Float[Tensor, "b l k"]:
    """The Laplacian positions of each document by itself; zeros for tokens without storage."""
    vectors = torch.zeros(*tokens.shape, count, device=tokens.device)
    if tokens.is_meta:
        return vectors
    if segments is None:
        segments = torch.zeros_like(tokens)
    for row, row_segments in enumerate(segments):
        for segment in set(row_segments.tolist()) - {PADDING_SEGMENT}:
            # each document by itself, as in a batch of its own
            columns = (row_segments == segment).nonzero()[:, 0]
            start = int(columns[0])
            stop = int(columns[-1]) + 1
            inside = edges[row][(edges[row] >= start).all(-1) & (edges[row] < stop).all(-1)] - start
            numbers = laplacian_eigenvectors(inside.cpu().numpy(), stop - start, count)
            vectors[row, start:stop] = torch.from_numpy(numbers).to(vectors)
    return vectors


GRAPH_NODES = GraphNodes()
WHOLE_GRAPHS = WholeGraphs()
