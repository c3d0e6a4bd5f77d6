"""The common part of all tasks that assign labels, to whole rows or to the places of a row, and their scores."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from manyformer.base.errors import UserError
from manyformer.models.scores import ScoreKind, ScoreRecord, accuracy, f1
from manyformer.models.tasks.requests import (
    EvaluationRequest,
    EvaluationResult,
    LabelProbability,
    M,
    Prediction,
    PredictionRequest,
    TaskTokenizers,
    TextTokenizer,
)
from manyformer.models.tasks.task import Task
from manyformer.nn.batches import IGNORE_INDEX, Batch, to_device
from manyformer.nn.core import PADDING_SEGMENT
from manyformer.nn.model_inputs import Inputs


class LabelTask(Task[M]):
    """Assigns one label to each row, or `per_token` one to each place of a row that has a target.

    `nouns` are the labelled items in words, such as "images"."""

    score_kinds: Mapping[str, ScoreKind] = {"macro_f1": ScoreKind("%"), "micro_f1": ScoreKind("%")}
    per_token = False
    command: Literal["predict", "evaluate"] = "predict"
    nouns: str

    def random_targets(self, model: M, inputs: Inputs, generator: Generator) -> Int[Tensor, "*b"]:
        return torch.zeros_like(inputs.tokens if self.per_token else inputs.tokens[:, 0])

    def label_result(self, predicted: Sequence[str], references: Sequence[str]) -> EvaluationResult:
        """Accuracy, and F1 as the mean over classes, and of whole rows over these too."""
        scores: list[ScoreRecord] = [accuracy(predicted, references), f1(predicted, references)]
        if "micro_f1" in self.score_kinds:
            scores.append(f1(predicted, references, average="micro"))
        return EvaluationResult(scores, f"{len(references):,} {self.nouns}")


class BatchLabelTask(LabelTask[M]):
    """Assigns labels to the rows, or to the places in the rows, of batches."""

    @abstractmethod
    def read(self, model: M, batch: Any) -> tuple[Float[Tensor, "*b c"], Int[Tensor, "*b"]]:
        """The logits of all rows, or places, of a batch, and their targets."""

    def evaluate(self, request: EvaluationRequest[M]) -> EvaluationResult:
        """Accuracy and F1 over the labels."""
        assert request.batches is not None
        names = label_names(request.tokenizers)
        predicted = list[str]()
        references = list[str]()
        for number, batch in enumerate(request.batches, 1):
            moved: Batch = to_device(batch, request.model.device)
            logits, targets = self.read(request.model, moved)
            is_scored = targets != IGNORE_INDEX
            predicted += [names[label] for label in logits[is_scored].argmax(-1).tolist()]
            references += [names[label] for label in targets[is_scored].tolist()]
            request.on_progress(number / len(request.batches))
        return self.label_result(predicted, references)

    def predict(self, request: PredictionRequest[M]) -> Iterator[Prediction]:
        """The most likely labels of each row, or of each place of each row."""
        for batch in request.batches or ():
            moved: Batch = to_device(batch, request.model.device)
            logits, targets = self.read(request.model, moved)
            # a row without places is one prediction; one with places has a prediction for each
            if not self.per_token:
                yield from ranked_rows(request, logits)
                continue
            for row, is_labelled in zip(logits, targets != IGNORE_INDEX):
                yield tuple(ranked_labels(row[is_labelled], label_names(request.tokenizers), request.top))


def label_names(tokenizers: TaskTokenizers) -> tuple[str, ...]:
    """The names of the labels by class id. Raises UserError if the model was saved without them."""
    if tokenizers.labels is None:
        raise UserError("the model was saved without the names of its labels (labels.json), so answers cannot be told")
    return tokenizers.labels


def ranked_rows(request: PredictionRequest[Any], logits: Float[Tensor, "n c"]) -> Iterator[Prediction]:
    """The most likely labels of each row, as the prediction of an input."""
    for labels in ranked_labels(logits, label_names(request.tokenizers), request.top):
        yield (labels,)


def ranked_labels(
    logits: Float[Tensor, "n c"], names: Sequence[str], top: int
) -> Iterator[tuple[LabelProbability, ...]]:
    """The `top` most likely labels of each row with their probabilities, the best first."""
    probabilities, labels = logits.float().softmax(-1).topk(min(top, len(names)))
    for row, row_labels in zip(probabilities.tolist(), labels.tolist()):
        yield tuple(LabelProbability(names[label], value) for label, value in zip(row_labels, row))


def encode_rows(
    texts: Sequence[str], tokenizer: TextTokenizer, row_length: int, device: torch.device
) -> tuple[Int[Tensor, "b l"], Int[Tensor, "b l"]]:
    """Tokens and segment ids of texts as in training: with start and end token, cut at `row_length`, padded right."""
    # as `LabelsPipeline.add_rows` frames texts for training
    rows = [[tokenizer.bos, *tokenizer.encode(text)[: row_length - 2], tokenizer.eos] for text in texts]
    width = max(map(len, rows))
    tokens = torch.tensor([row + [tokenizer.pad] * (width - len(row)) for row in rows], device=device)
    segments = torch.tensor([[0] * len(row) + [PADDING_SEGMENT] * (width - len(row)) for row in rows], device=device)
    return tokens, segments
