"""The task: one number for each text."""

import math
from collections.abc import Mapping
from typing import final

import torch
from torch import Generator, Tensor

from manyformer.models import ClassHead, EncoderModel
from manyformer.models.scores import ScoreKind, ScoreRecord
from manyformer.models.tasks import register
from manyformer.models.tasks.masked_language_modelling import BIDIRECTIONAL, EncoderTask
from manyformer.models.tasks.requests import EvaluationRequest, EvaluationResult
from manyformer.models.tasks.task import Inputs, ScoreSums
from manyformer.models.tasks.toy import Toy, ToyDraw
from manyformer.nn.batches import TextUnits, to_device
from manyformer_text_regression.model import RegressionBatch, TextRegressor, squared_errors


@final
class TextRegression(EncoderTask[TextRegressor]):
    """Predicts a number for each text."""

    name = "text-regression"
    title = "text regression"
    model = TextRegressor
    data_forms: Mapping[str, str] = {"numbers": "numbered"}
    reasons: Mapping[str, str] = {
        **BIDIRECTIONAL,
        "packing": "a row has one number, so it holds one document",
        "per_token": "a row has one number, tokens have none",
        "loss": "its loss is a squared error, not a likelihood",
    }
    score_kinds: Mapping[str, ScoreKind] = {"rmse": ScoreKind("", lower_is_better=True, digits=4)}
    metrics: Mapping[str, bool] = {"loss": True, "mae": True}
    per_token = False
    has_labels = False

    def with_head(self, encoder: EncoderModel, classes: int) -> TextRegressor:
        """A projection of the mean over the tokens of any encoder of manyformer to one number."""
        return TextRegressor(encoder.embed, encoder.body, ClassHead(encoder.dim, 1, bias=True))

    def batch(self, model: TextRegressor, inputs: Inputs, targets: Tensor) -> RegressionBatch:
        return RegressionBatch(inputs.tokens, targets, inputs.segments)

    def random_targets(self, model: TextRegressor, inputs: Inputs, generator: Generator) -> Tensor:
        return torch.randn(len(inputs.tokens), generator=generator).to(inputs.tokens.device)

    def toy(self, model: TextRegressor, draw: ToyDraw) -> Toy:
        """Rows of symbols; the number is the share of symbols that equal the first one."""
        tokens = draw.repeated()
        numbers = (tokens == tokens[:, :1]).float().mean(1)
        return Toy(RegressionBatch(tokens, numbers), float(numbers.var(unbiased=False)))

    def validation(self, sums: ScoreSums, units: TextUnits | None) -> dict[str, float]:
        """The mean squared error, which is the loss, its root, and the mean absolute error."""
        loss, mae = (total / max(1, sums.targets) for total in (sums.nats, sums.others["absolute_error"]))
        return {"loss": loss, "rmse": math.sqrt(loss), "mae": mae}

    def evaluate(self, request: EvaluationRequest[TextRegressor]) -> EvaluationResult:
        """The root of the mean squared error."""
        assert request.batches is not None
        errors = []
        for number, batch in enumerate(request.batches, 1):
            moved = to_device(batch, request.model.device)
            errors.append(squared_errors(request.model(moved.tokens, moved.segments).logits, moved.numbers))
            request.on_progress(number / len(request.batches))
        squares = torch.cat(errors)
        score = ScoreRecord("rmse", float(squares.mean().sqrt()), f"root mean squared error:{len(squares)}", digits=4)
        return EvaluationResult([score], f"{len(squares):,} texts")


TEXT_REGRESSION = TextRegression()
register(TEXT_REGRESSION)
