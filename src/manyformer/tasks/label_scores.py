"""Scores of predicted labels, for all tasks that have labels."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from manyformer.batches import Batch, to_device
from manyformer.core import PADDING_SEGMENT
from manyformer.errors import UserError
from manyformer.scores import ScoreKind, ScoreRecord, accuracy, f1
from manyformer.tasks.requests import EvaluationRequest, LabelProbability, M
from manyformer.tasks.task import Inputs, Task
from manyformer.tasks.tokenizer_protocols import TaskTokenizers, TextTokenizer


class RowLabelTask(Task[M]):
    """Assigns one label to each row."""

    score_kinds: Mapping[str, ScoreKind] = {"macro_f1": ScoreKind("%"), "micro_f1": ScoreKind("%")}
    per_token = False
    command = "predict"

    def random_targets(self, model: M, inputs: Inputs, generator: Generator) -> Int[Tensor, " b"]:
        return torch.zeros_like(inputs.tokens[:, 0])


def label_names(tokenizers: TaskTokenizers) -> tuple[str, ...]:
    """The names of the labels by class id. Raises UserError if the model was saved without them."""
    if tokenizers.labels is None:
        raise UserError("the model was saved without the names of its labels (labels.json), so answers cannot be told")
    return tokenizers.labels


def labels_of_batches(
    request: EvaluationRequest[Any], logits_and_targets: Callable[[Any], tuple[Float[Tensor, "n c"], Int[Tensor, " n"]]]
) -> tuple[list[str], list[str]]:
    """The most likely labels of all batches, and the right ones."""
    assert request.batches is not None
    names, predicted, references = label_names(request.tokenizers), list[str](), list[str]()
    for number, batch in enumerate(request.batches, 1):
        moved: Batch = to_device(batch, request.model.device)
        logits, targets = logits_and_targets(moved)
        predicted += [names[label] for label in logits.argmax(-1).tolist()]
        references += [names[label] for label in targets.tolist()]
        request.on_progress(number / len(request.batches))
    return predicted, references


def ranked_labels(
    logits: Float[Tensor, "n c"], names: Sequence[str], top: int
) -> Iterator[tuple[LabelProbability, ...]]:
    """The `top` most likely labels of each row with their probabilities, the best first."""
    probabilities, labels = logits.float().softmax(-1).topk(min(top, len(names)))
    for row, row_labels in zip(probabilities.tolist(), labels.tolist()):
        yield tuple(LabelProbability(names[label], value) for label, value in zip(row_labels, row))


def row_label_scores(predicted: Sequence[str], references: Sequence[str]) -> list[ScoreRecord]:
    """Accuracy, and F1 as mean over classes and over rows."""
    return [accuracy(predicted, references), f1(predicted, references), f1(predicted, references, average="micro")]


def encode_rows(
    texts: Sequence[str], tokenizer: TextTokenizer, row_length: int, device: torch.device
) -> tuple[Int[Tensor, "b l"], Int[Tensor, "b l"]]:
    """Tokens and segment ids of texts as in training: with start and end token, cut at `row_length`, padded right."""
    rows = [[tokenizer.bos, *tokenizer.encode(text)[: row_length - 2], tokenizer.eos] for text in texts]
    width = max(map(len, rows))
    tokens = torch.tensor([row + [tokenizer.pad] * (width - len(row)) for row in rows], device=device)
    segments = torch.tensor([[0] * len(row) + [PADDING_SEGMENT] * (width - len(row)) for row in rows], device=device)
    return tokens, segments
