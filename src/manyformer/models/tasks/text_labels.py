"""The tasks of assigning one label to each row of text: a text, or a pair of sentences."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, final

from torch import Tensor, nn

from manyformer.models import ClassHead, EncoderModel, TextClassifier
from manyformer.models.encoder_model import first_token
from manyformer.models.tasks.label_task import LabelTask, encode_rows, label_names, ranked_rows
from manyformer.models.tasks.masked_language_modelling import EncoderHeadSettings, EncoderTask
from manyformer.models.tasks.requests import (
    EncodedText,
    EvaluationRequest,
    EvaluationResult,
    Example,
    Prediction,
    PredictionRequest,
    TextPass,
    TextTokenizer,
)
from manyformer.models.tasks.task import text_pass
from manyformer.models.tasks.toy import Toy, ToyDraw
from manyformer.nn.attention.global_local import GlobalLocalAttention
from manyformer.nn.batches import ClassificationBatch
from manyformer.nn.batches.two_texts import frame_pair, halves, pad_texts
from manyformer.nn.model_inputs import Inputs
from manyformer.nn.runtime.dropout import Dropout

ROWS_PER_BATCH = 64
POOLER_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu-tanh": partial(nn.GELU, "tanh"),
}
"""The activations of the dense layer of a head."""


class TextLabelTask(LabelTask[TextClassifier], EncoderTask[TextClassifier]):
    """Assigns one label to each row, which is an item: a text, or a pair of texts."""

    model = TextClassifier
    reasons: Mapping[str, str] = {
        "causal": "a label may depend on the whole text",
        "incremental_decoding": "a later token may change the label, so nothing can be cached",
        "cross_attention": "it reads one sequence only",
        "packing": "a row has one label, so it holds one document",
        "per_token": "a row has one label, tokens have none",
    }
    argument = "FILE"
    has_pooler = True

    @abstractmethod
    def item_of(self, example: Example) -> Any:
        """The item of a held-out example."""

    @abstractmethod
    def items_of(self, request: PredictionRequest[TextClassifier]) -> Iterable[Any]:
        """The items to predict labels for."""

    @abstractmethod
    def encode(
        self, model: TextClassifier, items: list[Any], tokenizer: TextTokenizer, row_length: int
    ) -> tuple[Tensor | None, ...]:
        """The arguments of `model.forward` for these items, of at most `row_length` tokens."""

    def batch(self, model: TextClassifier, inputs: Inputs, targets: Tensor) -> ClassificationBatch:
        tokens, segments, *parts = self.arguments(model, inputs)
        return ClassificationBatch(tokens, targets, segments, *parts)

    def toy(self, model: TextClassifier, draw: ToyDraw) -> Toy:
        """Rows of eight tokens with one 5 and one 6; the label is whether the 5 comes first."""
        tokens, labels = draw.ordered_marks()
        return Toy(self.batch(model, Inputs(tokens), labels), math.log(2))

    def model_reasons(self, model: TextClassifier) -> Mapping[str, str]:
        # a global token has projections of its own, by which alone the label is read
        if model.pool is not first_token or not any(isinstance(part, GlobalLocalAttention) for part in model.modules()):
            return super().model_reasons(model)
        return {
            **super().model_reasons(model),
            "gradients": "the label is read at a global token, and the other projections of the last layer are for the "
            "other tokens",
        }

    def with_head(self, encoder: EncoderModel, settings: EncoderHeadSettings) -> TextClassifier:
        """BERT's head: a dense layer with tanh, dropout and a projection of the first token (Devlin et al. 2019)."""
        activation = POOLER_ACTIVATIONS[settings.pooler_activation]()
        transform = nn.Sequential(nn.Linear(encoder.dim, encoder.dim), activation, Dropout(encoder.embed.dropout.p))
        head = ClassHead(encoder.dim, settings.classes, transform=transform, bias=True)
        return TextClassifier(encoder.embed, encoder.body, head, pool=first_token)

    def evaluate(self, request: EvaluationRequest[TextClassifier]) -> EvaluationResult:
        """Accuracy and F1 over classes."""
        model = request.model
        examples = request.examples
        names = label_names(request.tokenizers)
        # rows of similar length need little padding
        order = sorted(range(len(examples)), key=lambda index: len(examples[index].source))
        predicted = [""] * len(examples)
        for start in range(0, len(order), ROWS_PER_BATCH):
            indices = order[start : start + ROWS_PER_BATCH]
            items = [self.item_of(examples[index]) for index in indices]
            arguments = self.encode(model, items, request.tokenizers.source, request.row_length)
            labels = model(*arguments).logits.argmax(-1)
            for index, label in zip(indices, labels.tolist()):
                # back in the order of the examples
                predicted[index] = names[label]
            request.on_progress((start + len(indices)) / len(order))
        return self.label_result(predicted, [example.target for example in examples])

    def predict(self, request: PredictionRequest[TextClassifier]) -> Iterator[Prediction]:
        """The most likely labels of each item."""
        model = request.model
        items = iter(self.items_of(request))
        # batches of a stream: labels of a pipe come out while it is read
        while chunk := list(islice(items, ROWS_PER_BATCH)):
            arguments = self.encode(model, chunk, request.tokenizers.source, request.row_length)
            yield from ranked_rows(request, model(*arguments).logits)

    def text_passes(self, model: TextClassifier, text: EncodedText) -> list[TextPass]:
        return [text_pass(self, model, [text.tokenizer.bos, *text.ids, text.tokenizer.eos], text)]


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


@final
class SentencePairs(TextLabelTask):
    """Assigns one label to each pair of sentences, which share a row (Devlin et al. 2019, section 4.1).

    Models with sentence types or parts get the sentence that each token belongs to; in drawn tokens the first one is
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


CLASSIFICATION = Classification()
SENTENCE_PAIRS = SentencePairs()
