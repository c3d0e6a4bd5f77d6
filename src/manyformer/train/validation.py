"""Scores of the validation data while training."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Protocol

from manyformer.batches import Batch
from manyformer.config import EvaluateConfig
from manyformer.models import BatchScore
from manyformer.train.data_protocols import ValidationData
from manyformer.train.process_group import ProcessGroup


def nobody() -> bool:
    """Nobody asks to stop."""
    return False


class BatchScorer(Protocol):
    """Begins a pass over batches, and gives what scores them in their order."""

    def __call__(self, *, goes_on: bool) -> Callable[[Batch], BatchScore]: ...


class Validator:
    """Scores the model on validation data: loss in nats per target, accuracy, perplexity, bits per byte of text."""

    def __init__(
        self, scorer: BatchScorer, batches: ValidationData, config: EvaluateConfig, world: ProcessGroup
    ) -> None:
        self._scorer, self._config, self._world = scorer, config, world
        self._batches = batches if world.size == 1 else batches.shard(world.rank, world.size)
        units = batches.units
        self._bytes_per_target = None if units is None else units.bytes / units.targets

    def __call__(self, stop: Callable[[], bool] = nobody) -> dict[str, float] | None:
        """The scores of the model as it is now; None where `stop` asked to end before all was scored."""
        nats, targets, correct = 0.0, 0.0, 0.0
        score = self._scorer(goes_on=self._batches.goes_on)
        for batch in self._chosen():
            if stop():
                return None
            scored = score(batch)
            nats += float(scored.nll)
            targets += int(scored.targets)
            correct += int(scored.correct)
        nats, targets, correct = self._world.sums([nats, targets, correct])
        return scores(nats, targets, correct, self._bytes_per_target)

    def _chosen(self) -> Iterator[Batch]:
        """As many batches as are asked for, evenly over all: held-out sequences come in order of their length.

        Those whose rows go on from each other are taken from the first one on.
        """
        there = len(self._batches)
        wanted = min(there, self._config.batches or there)
        if self._batches.goes_on:
            return itertools.islice(self._batches, wanted)
        chosen = {number * there // wanted for number in range(wanted)}
        return (batch for number, batch in enumerate(self._batches) if number in chosen)

    @property
    def metric(self) -> str:
        """The name of the score that decides."""
        return self._config.metric

    def sort_key(self, scored: dict[str, float]) -> float:
        """The metric that decides, turned so that smaller is better."""
        return scored["loss"] if self._config.metric == "loss" else -scored["accuracy"]


def scores(nats: float, targets: float, correct: float, bytes_per_target: float | None) -> dict[str, float]:
    """The scores from their sums."""
    loss = nats / max(1, targets)
    found = {
        "loss": loss,
        "accuracy": correct / max(1, targets),
        # beyond this a float overflows; infinity says as much
        "perplexity": math.exp(loss) if loss < 700 else math.inf,
    }
    if bytes_per_target is not None:
        found["bits_per_byte"] = loss / math.log(2) / bytes_per_target
    return found
