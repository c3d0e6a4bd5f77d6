"""The README.md beside a final model: what it is, what it learned from, how, and how well."""

from collections.abc import Sequence

from manyformer.config import RunConfig
from manyformer.models import Model
from manyformer.recipes import RecipeCard


def model_card(
    run: RunConfig,
    card: RecipeCard,
    model: Model,
    *,
    data: Sequence[str],
    chosen: str,
    scores: dict[str, float],
    step: int,
) -> str:
    """The card in Markdown."""
    weights = sum(weight.numel() for weight in model.parameters())
    settings = "\n".join(f"- {name}: {value}" for name, value in model.spec.keywords.items())
    table = "\n".join(f"| {name.replace('_', ' ')} | {value:.4f} |" for name, value in scores.items())
    learned = "\n".join(f"- {line}" for line in data)
    return f"""# {card.title}

{card.paper}. {card.summary}

Made by manyformer from the recipe `{card.name}`, {weights:,} parameters. Load it with
`manyformer.load("this folder")`.

## Data

{learned}

## Scores on the validation data

After {step} steps; the weights are {chosen}. The loss is in nats per target.

| score | value |
| --- | --- |
{table}

## Model settings

{settings}

## Training settings

Optimiser {run.optim.name}, schedule {run.schedule.name}, {run.batch.tokens * run.batch.accumulate:,} tokens a step,
label smoothing {run.loss.smoothing:g}, seed {run.seed}. All of them are in `run.yaml` of the run.
"""
