"""The task of assigning one label to each pair of sentences."""

from collections.abc import Iterable, Mapping
from typing import Any, final

from torch import Tensor

from manyformer.models import TextClassifier
from manyformer.tasks.requests import Example, PredictionRequest
from manyformer.tasks.task import Inputs
from manyformer.tasks.text_labels import TextLabelTask
from manyformer.tasks.tokenizer_protocols import TextTokenizer
from manyformer.two_texts import frame_pair, halves, pad_texts


@final
class SentencePairs(TextLabelTask):
    """Assigns one label to each pair of sentences, which share a row (Devlin et al. 2019, section 4.1).

    Models with sentence types or parts are told which sentence a token belongs to; in drawn tokens the first one is
    the first sentence."""

    name = "sentence-pairs"
    title = "labelling pairs of sentences"
    data_forms: Mapping[str, str] = {"sentence-pairs": "labelled"}
    nouns = "pairs"

    def arguments(self, model: TextClassifier, inputs: Inputs) -> tuple[Any, ...]:
        parts = None
        if model.uses_parts:
            parts = halves(inputs.tokens, inputs.segments)
        return inputs.tokens, inputs.segments, None, parts

    def item_of(self, example: Example) -> tuple[str, str]:
        return example.source, example.more[0]

    def items_of(self, request: PredictionRequest[TextClassifier]) -> Iterable[tuple[str, str]]:
        return request.pairs

    def encode(
        self, model: TextClassifier, items: list[tuple[str, str]], tokenizer: TextTokenizer, row_length: int
    ) -> tuple[Tensor | None, ...]:
        encoded = ((tokenizer.encode(first), tokenizer.encode(second)) for first, second in items)
        rows = (frame_pair(first, second, tokenizer, row_length) for first, second in encoded)
        tokens, segments, parts = pad_texts(rows, tokenizer.pad, model.device)
        return tokens, segments, None, parts if model.uses_parts else None


SENTENCE_PAIRS = SentencePairs()
