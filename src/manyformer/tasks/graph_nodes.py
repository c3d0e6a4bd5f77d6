"""The task of assigning a label to each node of a graph."""

import math
from collections.abc import Mapping
from typing import Any, final

import torch
from jaxtyping import Int
from torch import Generator, Tensor

from manyformer.batches import IGNORE_INDEX, Batch, GraphBatch, to_device
from manyformer.models import GraphClassifier, NodeClassifier
from manyformer.scores import ScoreKind, accuracy, f1
from manyformer.tasks.drawn_graphs import batch_of_tokens
from manyformer.tasks.label_scores import labels_of_batches
from manyformer.tasks.model_passes import TextPass
from manyformer.tasks.requests import EvaluationRequest, EvaluationResult
from manyformer.tasks.stand_in_vectors import STAND_IN_IDS
from manyformer.tasks.task import Inputs, Task
from manyformer.tasks.tokenizer_protocols import TaskTokenizers
from manyformer.tasks.toy import FIRST_SYMBOL, PERIOD, SYMBOLS, Toy, ToyDraw

GRAPH_REASONS: Mapping[str, str] = {
    "causal": "a node depends on its neighbours, wherever in the row they are",
    "incremental_decoding": "a later node changes its neighbours, so no state can be cached",
    "cross_attention": "it reads one graph only",
}
"""Promises that a model of graphs cannot make, with the reasons."""


@final
class GraphNodes(Task[NodeClassifier]):
    """Assigns a label to each node; drawn tokens get edges that are derived from them."""

    name = "graph-nodes"
    title = "labelling nodes of graphs"
    model = NodeClassifier
    data_forms: Mapping[str, str] = {"graphs": "nodes"}
    reasons = GRAPH_REASONS
    score_kinds: Mapping[str, ScoreKind] = {"macro_f1": ScoreKind("%")}

    def token_ids(self, model: NodeClassifier) -> int:
        return STAND_IN_IDS

    def arguments(self, model: NodeClassifier, inputs: Inputs) -> tuple[Any, ...]:
        return batch_of_tokens(model, inputs, inputs.tokens).inputs

    def batch(self, model: NodeClassifier, inputs: Inputs, targets: Tensor) -> GraphBatch:
        return batch_of_tokens(model, inputs, targets)

    def random_targets(self, model: NodeClassifier, inputs: Inputs, generator: Generator) -> Int[Tensor, "b l"]:
        return torch.zeros_like(inputs.tokens)

    def toy(self, model: NodeClassifier, draw: ToyDraw) -> Toy:
        """The label is whether most of a node and its two neighbours on a ring are in the upper half of the symbols."""
        tokens = draw.symbols(2 * PERIOD)
        is_upper = (tokens >= FIRST_SYMBOL + SYMBOLS // 2).long()
        targets = (is_upper + is_upper.roll(1, 1) + is_upper.roll(-1, 1) >= 2).long()
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        clockwise = torch.stack([columns, columns.roll(1)], -1)
        ring = torch.cat([clockwise, clockwise.flip(-1)]).expand(len(tokens), -1, -1)
        return Toy(batch_of_tokens(model, Inputs(tokens), targets)._replace(edges=ring), math.log(2))

    def evaluate(self, request: EvaluationRequest[NodeClassifier]) -> EvaluationResult:
        """Accuracy and F1 over the labels of nodes."""

        def logits_and_targets(batch: GraphBatch) -> tuple[Tensor, Tensor]:
            is_scored = batch.targets != IGNORE_INDEX
            return request.model(*batch.inputs).logits[is_scored], batch.targets[is_scored]

        predicted, references = labels_of_batches(request, logits_and_targets)
        scores = [accuracy(predicted, references), f1(predicted, references)]
        return EvaluationResult(scores, f"{len(predicted):,} nodes")

    def example_pass(self, model: NodeClassifier, batch: Batch, tokenizers: TaskTokenizers) -> TextPass:
        """The nodes of the first row of graphs."""
        return pass_over_nodes(model, batch)


def pass_over_nodes(model: NodeClassifier | GraphClassifier, batch: Batch) -> TextPass:
    """The pass of a model over the first row of a batch of graphs, with its nodes as numbers."""
    assert isinstance(batch, GraphBatch)
    moved: Any = to_device(batch, model.device)
    row = [None if part is None else part[:1] for part in moved.inputs]
    length = moved.features.shape[1]
    count = length if moved.segments is None else int((moved.segments[0] >= 0).sum())
    labels = tuple(f"node {number}" for number in range(count))
    return TextPass(lambda watch: model(*row, watch=watch), labels, length)


GRAPH_NODES = GraphNodes()
