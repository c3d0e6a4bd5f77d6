"""The task of assigning one label to each graph."""

import math
from collections.abc import Mapping
from typing import Any, final

import torch
from jaxtyping import Int
from torch import Generator, Tensor

from manyformer.batches import Batch, GraphBatch
from manyformer.models import GraphClassifier
from manyformer.scores import ScoreKind
from manyformer.tasks.drawn_graphs import batch_of_tokens
from manyformer.tasks.graph_nodes import GRAPH_REASONS, pass_over_nodes
from manyformer.tasks.label_scores import labels_of_batches, row_label_scores
from manyformer.tasks.model_passes import TextPass
from manyformer.tasks.requests import EvaluationRequest, EvaluationResult
from manyformer.tasks.stand_in_vectors import STAND_IN_IDS
from manyformer.tasks.task import Inputs, Task
from manyformer.tasks.tokenizer_protocols import TaskTokenizers
from manyformer.tasks.toy import FIRST_SYMBOL, PERIOD, Toy, ToyDraw


@final
class WholeGraphs(Task[GraphClassifier]):
    """Assigns one label to each graph; drawn tokens get edges that are derived from them."""

    name = "graphs"
    title = "labelling graphs"
    model = GraphClassifier
    data_forms: Mapping[str, str] = {"graphs": "graphs"}
    reasons: Mapping[str, str] = {
        **GRAPH_REASONS,
        "packing": "a row has one label, so it holds one graph",
        "per_token": "a graph has one label, its nodes have none",
    }
    score_kinds: Mapping[str, ScoreKind] = {"macro_f1": ScoreKind("%"), "micro_f1": ScoreKind("%")}
    per_token = False

    def token_ids(self, model: GraphClassifier) -> int:
        return STAND_IN_IDS

    def arguments(self, model: GraphClassifier, inputs: Inputs) -> tuple[Any, ...]:
        return batch_of_tokens(model, inputs, inputs.tokens).inputs

    def batch(self, model: GraphClassifier, inputs: Inputs, targets: Tensor) -> GraphBatch:
        return batch_of_tokens(model, inputs, targets)

    def random_targets(self, model: GraphClassifier, inputs: Inputs, generator: Generator) -> Int[Tensor, " b"]:
        return torch.zeros_like(inputs.tokens[:, 0])

    def toy(self, model: GraphClassifier, draw: ToyDraw) -> Toy:
        """Rings of equal nodes but for two, which are neighbours or opposite to each other: that is the label."""
        tokens = draw.symbols(2 * PERIOD).fill_(FIRST_SYMBOL)
        labels = torch.randint(2, (len(tokens),), generator=draw.generator).to(tokens.device)
        rows = torch.arange(len(tokens), device=tokens.device)
        tokens[:, 0] = FIRST_SYMBOL + 1
        tokens[rows, torch.where(labels == 1, 1, PERIOD)] = FIRST_SYMBOL + 2
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        clockwise = torch.stack([columns, columns.roll(1)], -1)
        ring = torch.cat([clockwise, clockwise.flip(-1)]).expand(len(tokens), -1, -1)
        return Toy(batch_of_tokens(model, Inputs(tokens), labels)._replace(edges=ring), math.log(2))

    def example_pass(self, model: GraphClassifier, batch: Batch, tokenizers: TaskTokenizers) -> TextPass:
        """The nodes of the first graph."""
        return pass_over_nodes(model, batch)

    def evaluate(self, request: EvaluationRequest[GraphClassifier]) -> EvaluationResult:
        """Accuracy and F1 over the labels of graphs."""

        def logits_and_targets(batch: GraphBatch) -> tuple[Tensor, Tensor]:
            return request.model(*batch.inputs).logits, batch.targets

        predicted, references = labels_of_batches(request, logits_and_targets)
        return EvaluationResult(row_label_scores(predicted, references), f"{len(predicted):,} graphs")


WHOLE_GRAPHS = WholeGraphs()
