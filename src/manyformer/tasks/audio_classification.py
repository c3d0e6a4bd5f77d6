"""The task of assigning one label to each recording."""

import math
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor

from manyformer.batches import AudioClassificationBatch
from manyformer.models import AudioClassifier
from manyformer.tasks.label_task import BatchLabelTask
from manyformer.tasks.task import Inputs
from manyformer.tasks.toy import STAND_IN_IDS, Toy, ToyDraw, stand_in_vectors

FRAMES_PER_SYMBOL = 4


@final
class AudioClassification(BatchLabelTask[AudioClassifier]):
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
    nouns = "recordings"

    def token_ids(self, model: AudioClassifier) -> int:
        return STAND_IN_IDS

    def arguments(self, model: AudioClassifier, inputs: Inputs) -> tuple[Any, ...]:
        return stand_in_vectors(torch.randn, model.embed.mels, inputs.tokens.device)(inputs.tokens), inputs.segments

    def batch(self, model: AudioClassifier, inputs: Inputs, targets: Tensor) -> AudioClassificationBatch:
        features, segments = self.arguments(model, inputs)
        return AudioClassificationBatch(features, targets, segments)

    def toy(self, model: AudioClassifier, draw: ToyDraw) -> Toy:
        """Eight sounds of four frames each with one 5 and one 6; the label is whether the 5 comes first."""
        tokens, labels = draw.ordered_marks()
        inputs = Inputs(tokens.repeat_interleave(FRAMES_PER_SYMBOL, 1))
        return Toy(self.batch(model, inputs, labels), math.log(2))

    def read(self, model: AudioClassifier, batch: AudioClassificationBatch) -> tuple[Tensor, Tensor]:
        return model(batch.features, batch.segments).logits, batch.labels


AUDIO_CLASSIFICATION = AudioClassification()
