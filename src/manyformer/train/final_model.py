"""The final weights of a run: those of one checkpoint, or the average of several."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from manyformer.train.engine import TrainingEngine
from manyformer.train.validation import Validator


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
