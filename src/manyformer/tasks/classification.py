"""The task of assigning one label to each text."""

from collections.abc import Iterable, Mapping
from typing import final

from torch import Tensor

from manyformer.models import TextClassifier
from manyformer.tasks.label_task import encode_rows
from manyformer.tasks.requests import Example, PredictionRequest
from manyformer.tasks.text_labels import TextLabelTask
from manyformer.tasks.tokenizer_protocols import TextTokenizer


@final
class Classification(TextLabelTask):
    """Assigns one label to each text."""

    name = "classification"
    title = "text classification"
    data_forms: Mapping[str, str] = {"labels": "labelled", "synthetic": "labelled"}
    nouns = "texts"

    def item_of(self, example: Example) -> str:
        return example.source

    def items_of(self, request: PredictionRequest[TextClassifier]) -> Iterable[str]:
        return request.texts

    def encode(
        self, model: TextClassifier, items: list[str], tokenizer: TextTokenizer, row_length: int
    ) -> tuple[Tensor | None, ...]:
        return encode_rows(items, tokenizer, row_length, model.device)


CLASSIFICATION = Classification()
