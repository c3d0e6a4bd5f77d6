"""The final model of a run: the weights of one checkpoint, or the average of several, and a card for people."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from manyformer.config import RunConfig
from manyformer.files.json_records import Count, FileRecord
from manyformer.models import Model
from manyformer.recipes import RecipeCard
from manyformer.system.printable_text import printable_line
from manyformer.train.engine import TrainingEngine
from manyformer.train.events import TrainResult
from manyformer.train.validation import Validator


class ResultRecord(FileRecord):
    """The content of result.json: how a run ended, and the settings that chose its final weights."""

    title = "the result of a run"
    format_number = 2
    step: Count
    reason: str
    chosen_weights: str
    scores: dict[str, float]
    save: dict[str, Any]

    @classmethod
    def of(cls, result: TrainResult, run: RunConfig) -> Self:
        """The record of a result of this run."""
        return cls(
            step=result.step,
            reason=result.reason,
            chosen_weights=result.chosen_weights,
            scores=result.scores,
            save=run.save.model_dump(mode="json"),
        )

    def result(self, out: Path) -> TrainResult:
        """The result of the run in the folder `out`."""
        return TrainResult(out, self.step, self.reason, self.chosen_weights, self.scores)


class WeightChoice(NamedTuple):
    """A candidate for the final weights: its checkpoint, description and scores on the validation data."""

    checkpoint: Path
    description: str
    scores: dict[str, float]


def choose_weights(
    engine: TrainingEngine, single: WeightChoice, averaged: Sequence[Path], validator: Validator
) -> WeightChoice:
    """Load the weights of `single` into the model, or the average of checkpoints if that scores better."""
    if len(averaged) > 1:
        engine.average(averaged)
        scores = validator()
        assert scores is not None
        description = f"the average of the last {len(averaged)} checkpoints"
        if validator.sort_key(scores) < validator.sort_key(single.scores):
            return single._replace(description=f"{description}, better than {single.description}", scores=scores)
        comparison = f"{description} is not better ({validator.metric} {scores[validator.metric]:.4f})"
        single = single._replace(description=f"{single.description}; {comparison}")
    engine.read_weights(single.checkpoint)
    return single


def model_card(run: RunConfig, card: RecipeCard, model: Model, data: Sequence[str], result: TrainResult) -> str:
    """Format the model card as Markdown; `data` are lines that describe the data."""
    parameters = sum(weight.numel() for weight in model.parameters())
    table = "\n".join(f"| {name.replace('_', ' ')} | {value:.4f} |" for name, value in result.scores.items())
    data_lines = "\n".join(printable_line(f"- {line}") for line in data)
    return f"""# {card.title}

{card.paper}. {card.summary}

Made by manyformer from the recipe `{card.name}`, {parameters:,} parameters. Load it with
`manyformer.load("this folder")`.

## Data

{data_lines}

## Scores on the validation data

After {result.step} steps; the weights are {result.chosen_weights}. The loss is in nats per target.

| score | value |
| --- | --- |
{table}

## Model settings

{model.spec.settings_list()}

## Training settings

Optimizer {run.optim.name}, schedule {run.schedule.name}, {run.batch.tokens * run.batch.accumulate:,} tokens a step,
label smoothing {run.loss.label_smoothing:g}, seed {run.seed}. All of them are in `run.yaml` of the run.
"""
