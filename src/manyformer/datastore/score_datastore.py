"""What a datastore is worth: a text scored with and without it."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from manyformer.datastore.datastore import Datastore, KNNSettings
from manyformer.datastore.knn_head import knn_lm
from manyformer.evaluate import Evaluation, evaluate
from manyformer.models import Model


class DatastoreScores(NamedTuple):
    """Scores of the model alone and with its datastore, and tokens a second of each."""

    mix: KNNSettings
    alone: Evaluation
    together: Evaluation
    alone_speed: float
    together_speed: float


def score(
    run: str | Path,
    store: Datastore,
    mix: KNNSettings,
    *,
    split: str | None = None,
    data: str | Sequence[str] | None = None,
    device: str | None = None,
    each: Callable[[str], None] = lambda what: None,
) -> DatastoreScores:
    """Score the final model of `run` on a split or a text, as `evaluate` does, twice. Raises UserError."""
    wraps: dict[str, Callable[[Model], Model]] = {
        f"{run} alone": lambda model: model,
        f"{run} with {store.folder}": partial(knn_lm, store=store, **mix._asdict()),
    }
    found, speeds = list[Evaluation](), list[float]()
    for name, wrap in wraps.items():
        clock = ThroughputClock(name, each)
        found.append(evaluate(run, split=split, data=data, device=device, wrap=clock.begins(wrap), each=clock))
        speeds.append(clock.share_a_second * int(found[-1]["perplexity"].signature.rpartition(":")[2]))
    return DatastoreScores(mix, found[0], found[1], speeds[0], speeds[1])


class ThroughputClock:
    """Hears how far scoring has got, and tells how fast that was once the model was there."""

    def __init__(self, name: str, each: Callable[[str], None]) -> None:
        self.name, self.each, self.times = name, each, list[tuple[float, float]]()

    def begins(self, wrap: Callable[[Model], Model]) -> Callable[[Model], Model]:
        """`wrap`, whose end is the beginning."""

        def wrapped(model: Model) -> Model:
            model = wrap(model)
            self.times.append((0.0, time.perf_counter()))
            return model

        return wrapped

    def __call__(self, share: float) -> None:
        self.times.append((share, time.perf_counter()))
        self.each(f"{self.name}: {share:.0%}")

    @property
    def share_a_second(self) -> float:
        """The first batch waits for the text to be read, and does not count where there are others."""
        (first, begun), (last, ended) = self.times[1 if len(self.times) > 2 else 0], self.times[-1]
        return (last - first) / (ended - begun)
