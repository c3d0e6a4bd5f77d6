"""The task of assigning a label to each example of several parts."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor

from manyformer.batches import ModalitiesBatch, to_device
from manyformer.models.multimodal_classifier import MultimodalClassifier
from manyformer.tasks.drawn_parts import batch_of_tokens
from manyformer.tasks.encoder_task import BIDIRECTIONAL
from manyformer.tasks.label_scores import RowLabelTask, label_names, labels_of_batches, ranked_labels, row_label_scores
from manyformer.tasks.requests import EvaluationRequest, EvaluationResult, Prediction, PredictionRequest
from manyformer.tasks.stand_in_vectors import STAND_IN_IDS
from manyformer.tasks.task import Inputs
from manyformer.tasks.toy import FIRST_SYMBOL, SYMBOLS, Toy, ToyDraw


@final
class MultimodalClassification(RowLabelTask[MultimodalClassifier]):
    """Assigns a label to each example; drawn tokens stand for its parts."""

    name = "multimodal-classification"
    title = "labelling examples of several parts"
    model = MultimodalClassifier
    data_forms: Mapping[str, str] = {"modalities": "labelled"}
    reasons: Mapping[str, str] = {
        **BIDIRECTIONAL,
        "packing": "a row has one label, so it holds one example",
        "per_token": "an example has one label, its parts have none",
    }
    argument = "EXAMPLES.npz"

    def token_ids(self, model: MultimodalClassifier) -> int:
        return model.embed.parts["text"].vocab if "text" in model.embed.parts else STAND_IN_IDS  # type: ignore[return-value]

    def arguments(self, model: MultimodalClassifier, inputs: Inputs) -> tuple[Any, ...]:
        return self.batch(model, inputs, torch.zeros(len(inputs.tokens), dtype=torch.long)).inputs

    def batch(self, model: MultimodalClassifier, inputs: Inputs, targets: Tensor) -> ModalitiesBatch:
        batch: ModalitiesBatch = batch_of_tokens(model.embed, inputs, targets)
        return batch

    def toy(self, model: MultimodalClassifier, draw: ToyDraw) -> Toy:
        """The label is whether the first of two tokens is the smaller one, where image and frames show both."""
        tokens = draw.symbols(2)
        labels = (tokens[:, 0] < FIRST_SYMBOL + SYMBOLS // 2).long()
        return Toy(self.batch(model, Inputs(tokens), labels), math.log(2))

    def evaluate(self, request: EvaluationRequest[MultimodalClassifier]) -> EvaluationResult:
        """Accuracy and F1 over the labels of examples."""

        def logits_and_targets(batch: ModalitiesBatch) -> tuple[Tensor, Tensor]:
            return request.model(*batch.inputs).logits, batch.labels

        predicted, references = labels_of_batches(request, logits_and_targets)
        return EvaluationResult(row_label_scores(predicted, references), f"{len(predicted):,} examples")

    def predict(self, request: PredictionRequest[MultimodalClassifier]) -> Iterator[Prediction]:
        """The most likely labels of each example."""
        for batch in request.batches or ():
            moved: Any = to_device(batch, request.model.device)
            logits = request.model(*moved.inputs).logits
            for labels in ranked_labels(logits, label_names(request.tokenizers), request.top):
                yield (labels,)


MULTIMODAL_CLASSIFICATION = MultimodalClassification()
