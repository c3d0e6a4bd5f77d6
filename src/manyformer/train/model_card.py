"""The model card (README.md) of a final model: recipe, data, scores and settings."""

from collections.abc import Sequence

from manyformer.config import RunConfig
from manyformer.models import Model
from manyformer.recipes import RecipeCard
from manyformer.system.printable_text import printable_line
from manyformer.train.events import TrainResult


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
