"""The task of assigning a label to each example of several parts."""

import math
from collections.abc import Mapping
from typing import final

from torch import Tensor

from manyformer.batches import ModalitiesBatch
from manyformer.models.modalities_model import MultimodalClassifier
from manyformer.tasks.drawn_parts import PartsTask
from manyformer.tasks.encoder_task import BIDIRECTIONAL
from manyformer.tasks.label_task import BatchLabelTask
from manyformer.tasks.task import Inputs
from manyformer.tasks.toy import FIRST_SYMBOL, SYMBOLS, Toy, ToyDraw


@final
class MultimodalClassification(BatchLabelTask[MultimodalClassifier], PartsTask[MultimodalClassifier]):
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
    nouns = "examples"

    def toy(self, model: MultimodalClassifier, draw: ToyDraw) -> Toy:
        """The label is whether the first of two tokens is the smaller one, where image and frames show both."""
        tokens = draw.symbols(2)
        labels = (tokens[:, 0] < FIRST_SYMBOL + SYMBOLS // 2).long()
        return Toy(self.batch(model, Inputs(tokens), labels), math.log(2))

    def read(self, model: MultimodalClassifier, batch: ModalitiesBatch) -> tuple[Tensor, Tensor]:
        return model(*batch.inputs).logits, batch.labels


MULTIMODAL_CLASSIFICATION = MultimodalClassification()
