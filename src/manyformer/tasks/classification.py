"""The task of assigning one label to each text."""

import math
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import final

import torch
from torch import Tensor

from manyformer.batches import ClassificationBatch
from manyformer.models import TextClassifier
from manyformer.tasks.encoder_task import EncoderTask
from manyformer.tasks.label_scores import RowLabelTask, encode_rows, label_names, ranked_labels, row_label_scores
from manyformer.tasks.task import (
    EncodedText,
    EvaluationRequest,
    EvaluationResult,
    Inputs,
    Prediction,
    PredictionRequest,
    TextPass,
    text_pass,
)
from manyformer.tasks.toy import FIRST_SYMBOL, PERIOD, Toy, ToyDraw

TEXTS_PER_BATCH = 64


@final
class Classification(RowLabelTask[TextClassifier], EncoderTask[TextClassifier]):
    """Assigns one label to each text."""

    name = "classification"
    title = "text classification"
    model = TextClassifier
    data_forms: Mapping[str, str] = {"labels": "labelled"}
    reasons: Mapping[str, str] = {
        "causal": "a label may depend on the whole text",
        "incremental_decoding": "a later token may change the label, so nothing can be cached",
        "cross_attention": "it reads one sequence only",
        "packing": "a row has one label, so it holds one document",
        "per_token": "a row has one label, tokens have none",
    }
    argument = "FILE"

    def batch(self, model: TextClassifier, inputs: Inputs, targets: Tensor) -> ClassificationBatch:
        return ClassificationBatch(inputs.tokens, targets, inputs.segments)

    def toy(self, model: TextClassifier, draw: ToyDraw) -> Toy:
        """Rows of eight tokens with one 5 and one 6; the label is whether the 5 comes first."""
        tokens = draw.symbols(2 * PERIOD).clamp(min=FIRST_SYMBOL + 2)
        order = torch.rand(tokens.shape, generator=draw.generator).argsort(dim=1)[:, :2].to(tokens.device)
        tokens.scatter_(1, order[:, :1], FIRST_SYMBOL).scatter_(1, order[:, 1:], FIRST_SYMBOL + 1)
        return Toy(ClassificationBatch(tokens, (order[:, 0] < order[:, 1]).long()), math.log(2))

    def evaluate(self, request: EvaluationRequest[TextClassifier]) -> EvaluationResult:
        """Accuracy and F1 over classes."""
        model, examples, names = request.model, request.examples, label_names(request.tokenizers)
        order = sorted(range(len(examples)), key=lambda index: len(examples[index].source))
        predicted = [""] * len(examples)
        for start in range(0, len(order), TEXTS_PER_BATCH):
            indices = order[start : start + TEXTS_PER_BATCH]
            texts = [examples[index].source for index in indices]
            tokens, segments = encode_rows(texts, request.tokenizers.source, request.row_length, model.device)
            labels = model(tokens, segments).logits.argmax(-1)
            for index, label in zip(indices, labels.tolist()):
                predicted[index] = names[label]
            request.on_progress((start + len(indices)) / len(order))
        references = [example.target for example in examples]
        return EvaluationResult(row_label_scores(predicted, references), f"{len(examples):,} texts")

    def predict(self, request: PredictionRequest[TextClassifier]) -> Iterator[Prediction]:
        """The most likely labels of each text."""
        model, names, texts = request.model, label_names(request.tokenizers), iter(request.texts)
        while chunk := list(islice(texts, TEXTS_PER_BATCH)):
            tokens, segments = encode_rows(chunk, request.tokenizers.source, request.row_length, model.device)
            for labels in ranked_labels(model(tokens, segments).logits, names, request.top):
                yield (labels,)

    def text_passes(self, model: TextClassifier, text: EncodedText) -> list[TextPass]:
        return [text_pass(self, model, [text.tokenizer.bos, *text.ids, text.tokenizer.eos], text)]


CLASSIFICATION = Classification()
