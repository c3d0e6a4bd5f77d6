"""The protocol of a task, what models of one class are for, and the likelihood of held-out batches under a model.

A task says what a model is given, how it is called, and how its outputs are judged."""

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Generator, Tensor

from manyformer.base.errors import UserError
from manyformer.base.keyword_checks import SharedKeywords
from manyformer.models import BatchScore, GenerativeModel, Model, ModelOutput
from manyformer.models.generative_model import NextTokenFn
from manyformer.models.model import CarriedState
from manyformer.models.scores import ScoreKind, ScoreRecord, perplexity, row_exact_match, token_accuracy
from manyformer.models.tasks.requests import (
    EncodedText,
    EvaluationRequest,
    EvaluationResult,
    ImagePass,
    ImageTokenizer,
    M,
    Prediction,
    PredictionRequest,
    TaskTokenizers,
    TextPass,
)
from manyformer.models.tasks.toy import Toy, ToyDraw
from manyformer.nn.batches import IGNORE_INDEX, Batch, TextUnits, to_device
from manyformer.nn.core import State, WatchFn, no_watch
from manyformer.nn.model_inputs import Inputs

LIKELIHOOD_SHARE = 0.1
"""The share of the progress of an evaluation that the likelihood takes where texts are written afterwards."""


@dataclass(frozen=True)
class ScoreSums:
    """Sums over all targets: nats, the number of targets, and how many were top-1.

    `others` are the sums of `BatchScore.others`, 0 for a name without any.
    """

    nats: float = 0.0
    targets: int = 0
    correct: int = 0
    others: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def plus(self, score: BatchScore) -> "ScoreSums":
        """The sums with those of another batch."""
        others = self.others.copy()
        for name, value in score.others.items():
            others[name] += float(value)
        return ScoreSums(
            self.nats + float(score.nll), self.targets + int(score.targets), self.correct + int(score.correct), others
        )


class Task(ABC, Generic[M]):
    """What all models of one class are for; an instance has no state.

    `data_forms` maps the kinds of data that can be learned from, the default first, to the form in which they are read.
    `reasons` are promises or contracts that no model of the task makes, and why; recipes inherit them. `score_kinds`
    are the scores of `evaluate` beyond the likelihood. `metrics` may rank checkpoints; True means lower is better.
    `bounds` are the scores of `validation` of which the true value is at most what is computed.
    `measured_anyway` are contracts that are measured though they are not promised. The logits are (b, l, v) if
    `per_token`, else (b, v). Models that play for a target return have `plays_for_returns`. `generates`
    is what the models generate, if anything ("answer" is a text for a text, "text" one for anything else, "canvas" one
    whose tokens are filled in any order), and `command` uses a trained one, with an `argument` such as FILE. Every
    recipe of the task has `recipe_keywords` besides its own.
    """

    name: str
    title: str
    model: type[M]
    data_forms: Mapping[str, str]
    reasons: Mapping[str, str] = {}
    score_kinds: Mapping[str, ScoreKind] = {}
    metrics: Mapping[str, bool] = {"loss": True, "accuracy": False}
    bounds: frozenset[str] = frozenset()
    measured_anyway: frozenset[str] = frozenset()
    per_token: bool = True
    takes_source: bool = False
    plays_for_returns: bool = False
    generates: Literal["continuation", "answer", "text", "images", "canvas"] | None = None
    command: Literal["generate", "translate", "caption", "transcribe", "predict", "evaluate"] = "evaluate"
    argument: str = ""
    recipe_keywords: SharedKeywords | None = None

    @abstractmethod
    def token_ids(self, model: M) -> int:
        """The number of token ids that the model reads: they are 0 to n - 1."""

    def model_reasons(self, model: M) -> Mapping[str, str]:
        """Contracts that this model does not make though others of the task do, and why."""
        return {}

    def fixed_length(self, model: M) -> int | None:
        """The number of tokens that every input has; None if lengths vary."""
        return None

    def example(self, model: M, tokens: Int[Tensor, "b l"]) -> Inputs:
        """Inputs made of these tokens only; a source has the same ones."""
        return Inputs(tokens)

    @abstractmethod
    def arguments(self, model: M, inputs: Inputs) -> tuple[Any, ...]:
        """The positional arguments of the model's `forward`; what is not tokens is derived from them."""

    def call(self, model: M, inputs: Inputs, state: State = None, *, watch: WatchFn = no_watch) -> ModelOutput:
        """One forward pass; with a state, `inputs` are the next tokens."""
        assert state is None
        output: ModelOutput = model(*self.arguments(model, inputs), watch=watch)
        return output

    def init_state(self, model: M, inputs: Inputs, *, capacity: int | None = None) -> State:
        """The state before any of the tokens."""
        raise NotImplementedError(f"{self.title} has no decoding state")

    def one_token_step(self, model: M) -> Callable[[], NextTokenFn] | None:
        """A function that binds the model's steps of one token per row; None if it has none."""
        if isinstance(model, GenerativeModel):
            return model.next_token
        return None

    @abstractmethod
    def batch(self, model: M, inputs: Inputs, targets: Tensor) -> Batch:
        """The batch with these inputs and targets."""

    @abstractmethod
    def random_targets(self, model: M, inputs: Inputs, generator: Generator) -> Tensor:
        """Arbitrary targets for measurements of a training step."""

    @abstractmethod
    def toy(self, model: M, draw: ToyDraw) -> Toy:
        """A batch of a problem that is learned within seconds and needs attention to other positions."""

    def validation(self, sums: ScoreSums, units: TextUnits | None) -> dict[str, float]:
        """The scores of validation data during training; `units` are those of all held-out data."""
        # held-out data may be so little that nothing of it is a target
        loss = sums.nats / max(1, sums.targets)
        scores = {
            "loss": loss,
            "accuracy": sums.correct / max(1, sums.targets),
            # exp overflows a float beyond this
            "perplexity": math.exp(loss) if loss < 700 else math.inf,
        }
        # per byte of text, which compares models of different tokenizers
        if units is not None:
            scores["bits_per_byte"] = loss / math.log(2) / (units.bytes / units.targets)
        return scores

    @abstractmethod
    def evaluate(self, request: EvaluationRequest[M]) -> EvaluationResult:
        """The scores of a trained model on held-out data."""

    def predict(self, request: PredictionRequest[M]) -> Iterable[Prediction]:
        """The predicted labels of each input. Raises UserError if the task predicts none."""
        raise UserError(f"{self.title} predicts no labels; `manyformer {self.command}` uses such a model")

    def text_passes(self, model: M, text: EncodedText) -> list[TextPass]:
        """The passes of the model over a text, for display. Raises UserError if the model reads no text."""
        raise UserError(f"{self.title} reads no plain text, so there is nothing to show for one")

    def image_pass(self, model: M, image: NDArray[np.uint8], tokenizer: ImageTokenizer | None) -> ImagePass:
        """The pass of the model over an image (h, w, c), for display. Raises UserError if the model reads no image."""
        raise UserError(f"{self.title} reads no image, so there is nothing to show for one")

    def example_pass(self, model: M, batch: Batch, tokenizers: TaskTokenizers) -> TextPass:
        """The pass of the model over the first row of a batch, for display. Raises UserError if it has none to show."""
        raise UserError(f"{self.title} is shown for its own inputs, not for a row of its data")

    def next_commands(self, run: Path, data: object) -> tuple[str, ...]:
        """Commands that use the model trained in the folder `run` on `data`, a run's data section."""
        if self.command == "evaluate":
            return ()
        return (f"manyformer {self.command} {run} {self.argument}".rstrip(),)

    def variant(self, data_kind: str) -> "Task[Any]":
        """The task that a recipe of this task has on another kind of data."""
        return self

    def built_with(self, keywords: Mapping[str, Any]) -> "Task[Any]":
        """The task of a model that a recipe of this task builds with these keywords, which may name a head."""
        return self

    def data_kinds(self) -> tuple[str, ...]:
        """The kinds of data that a recipe of this task learns from, the default first."""
        return tuple(self.data_forms)


def likelihood(request: EvaluationRequest[Any], *, final_progress: float = 1.0) -> ScoreSums:
    """The sums over all batches, with a carried state where the model has one and the rows continue."""
    assert request.batches is not None
    sums = ScoreSums()
    carried = CarriedState(request.model, rows_continue=request.batches.rows_continue)
    for number, batch in enumerate(request.batches, 1):
        # sums, not means of batches, which differ in their number of targets
        sums = sums.plus(carried.score(batch))
        request.on_progress(final_progress * number / len(request.batches))
    return sums


def token_scores(sums: ScoreSums) -> list[ScoreRecord]:
    """Perplexity and accuracy of the targets."""
    return [perplexity(sums.nats, sums.targets), token_accuracy(sums.correct, sums.targets)]


def row_accuracy(request: EvaluationRequest[Any]) -> ScoreRecord:
    """The percentage of rows all of whose targets are predicted, among the rows with a target."""
    assert request.batches is not None
    model = request.model
    matches = 0
    rows = 0
    for batch in request.batches:
        tokens, targets, segments, *_ = to_device(batch, model.device)
        predicted = model(tokens, segments).logits.argmax(-1)
        # a target that is not scored cannot be wrong
        is_scored = targets != IGNORE_INDEX
        has_target = is_scored.any(1)
        matches += int((((predicted == targets) | ~is_scored).all(1) & has_target).sum())
        rows += int(has_target.sum())
    return row_exact_match(matches, rows)


def text_pass(task: Task[M], model: M, ids: Sequence[int], text: EncodedText) -> TextPass:
    """One pass over the token ids, special tokens included. Raises UserError for an id that the model does not have."""
    tokens = token_row(model, ids, task.token_ids(model))
    labels = text.labels_of(ids)
    return TextPass(lambda watch: task.call(model, Inputs(tokens), watch=watch), labels, len(ids), tokens=tuple(ids))


def token_row(model: Model, ids: Sequence[int], vocab: int) -> Int[Tensor, "1 l"]:
    """Token ids as a batch of one row on the model's device. Raises UserError for an id beyond the vocabulary."""
    if invalid_ids := [token for token in ids if not 0 <= token < vocab]:
        raise UserError(f"the text has token {invalid_ids[0]}, but the model's tokens are 0 to {vocab - 1}")
    return torch.tensor([list(ids)], device=model.device)
