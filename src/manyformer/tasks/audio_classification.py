"""The task of assigning one label to each recording."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor

from manyformer.batches import AudioClassificationBatch, to_device
from manyformer.models import AudioClassifier
from manyformer.tasks.label_scores import (
    RowLabelTask,
    label_names,
    labels_of_batches,
    ranked_labels,
    row_label_scores,
)
from manyformer.tasks.requests import EvaluationRequest, EvaluationResult, Prediction, PredictionRequest
from manyformer.tasks.stand_in_vectors import STAND_IN_IDS, stand_in_vectors
from manyformer.tasks.task import Inputs
from manyformer.tasks.toy import FIRST_SYMBOL, PERIOD, Toy, ToyDraw

FRAMES_PER_SYMBOL = 4


@final
class AudioClassification(RowLabelTask[AudioClassifier]):
    """Assigns one label to each recording; drawn tokens stand for frames."""

    name = "audio-classification"
    title = "classification of recordings"
    model = AudioClassifier
    data_forms: Mapping[str, str] = {"audio": "labelled"}
    reasons: Mapping[str, str] = {
        "causal": "a label may depend on the whole recording",
        "incremental_decoding": "a later frame may change the label, so nothing can be cached",
        "cross_attention": "it reads one recording only",
        "packing": "a row has one label, so it holds one recording",
        "per_token": "a row has one label, frames have none",
    }
    argument = "FILES"

    def token_ids(self, model: AudioClassifier) -> int:
        return STAND_IN_IDS

    def arguments(self, model: AudioClassifier, inputs: Inputs) -> tuple[Any, ...]:
        return stand_in_vectors(torch.randn, model.embed.mels, inputs.tokens.device)(inputs.tokens), inputs.segments

    def batch(self, model: AudioClassifier, inputs: Inputs, targets: Tensor) -> AudioClassificationBatch:
        return AudioClassificationBatch(
            stand_in_vectors(torch.randn, model.embed.mels, inputs.tokens.device)(inputs.tokens),
            targets,
            inputs.segments,
        )

    def toy(self, model: AudioClassifier, draw: ToyDraw) -> Toy:
        """Eight sounds of four frames each with one 5 and one 6; the label is whether the 5 comes first."""
        tokens = draw.symbols(2 * PERIOD).clamp(min=FIRST_SYMBOL + 2)
        order = torch.rand(tokens.shape, generator=draw.generator).argsort(dim=1)[:, :2].to(tokens.device)
        tokens.scatter_(1, order[:, :1], FIRST_SYMBOL).scatter_(1, order[:, 1:], FIRST_SYMBOL + 1)
        inputs = Inputs(tokens.repeat_interleave(FRAMES_PER_SYMBOL, 1))
        return Toy(self.batch(model, inputs, (order[:, 0] < order[:, 1]).long()), math.log(2))

    def evaluate(self, request: EvaluationRequest[AudioClassifier]) -> EvaluationResult:
        """Accuracy and F1 over the labels of recordings."""

        def logits_and_targets(batch: AudioClassificationBatch) -> tuple[Tensor, Tensor]:
            return request.model(batch.features, batch.segments).logits, batch.labels

        predicted, references = labels_of_batches(request, logits_and_targets)
        return EvaluationResult(row_label_scores(predicted, references), f"{len(predicted):,} recordings")

    def predict(self, request: PredictionRequest[AudioClassifier]) -> Iterator[Prediction]:
        """The most likely labels of each recording."""
        for batch in request.batches or ():
            moved: Any = to_device(batch, request.model.device)
            logits = request.model(moved.features, moved.segments).logits
            for labels in ranked_labels(logits, label_names(request.tokenizers), request.top):
                yield (labels,)


AUDIO_CLASSIFICATION = AudioClassification()
