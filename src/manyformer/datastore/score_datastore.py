"""Evaluation of a datastore: scores and speed of a text with and without it."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from manyformer.data.token_shards import shard_units
from manyformer.datastore.datastore import Datastore
from manyformer.datastore.facts import KNNSettings
from manyformer.datastore.knn_head import check_fits, knn_lm
from manyformer.datastore.own_text import OwnText, OwnTextModel, check_own_text
from manyformer.evaluate import Evaluation, evaluate
from manyformer.evaluate.eval_data import open_run
from manyformer.models import Model


class DatastoreScores(NamedTuple):
    """Scores and tokens per second of the model alone and combined with the datastore.

    `own_text` are the documents of the text that overlap with the datastore, which were excluded.
    """

    settings: KNNSettings
    model_scores: Evaluation
    combined_scores: Evaluation
    model_speed: float
    combined_speed: float
    own_text: OwnText


def score_datastore(
    run: str | Path,
    store: Datastore,
    settings: KNNSettings,
    *,
    split: str | None = None,
    data: str | Sequence[str] | None = None,
    exclude_own: bool = False,
    device: str | None = None,
    on_status: Callable[[str], None] = lambda message: None,
) -> DatastoreScores:
    """Score the final model of `run` on a split or a text without and with the datastore, as `evaluate` does.

    The text is read in the windows that the datastore's text was read in, or in rows as in training.
    Raises UserError for a datastore that was built with another model, for documents that overlap with the datastore's,
    unless `exclude_own` excludes these from their neighbours, and for what `evaluate` refuses.
    """
    trained = open_run(run)
    check_fits(trained.load_model(device), store)
    with trained.open_data(split, data) as material:
        assert material.text is not None
        targets = shard_units(material.text).targets
        tokenizer = trained.tokenizers.source
        own_text = check_own_text(material.text, material.name, store, tokenizer, exclude_own=exclude_own)

    def combine(model: Model) -> Model:
        return OwnTextModel(knn_lm(model, store, **settings._asdict()), own_text)

    wrap_by_name: dict[str, Callable[[Model], Model]] = {
        f"{run} alone": lambda model: model,
        f"{run} with {store.folder}": combine,
    }
    evaluations = list[Evaluation]()
    speeds = list[float]()
    score = partial(evaluate, run, split=split, data=data, windows=store.facts.windows, device=device)
    for name, wrap in wrap_by_name.items():
        clock = ThroughputClock(name, wrap, on_status)
        evaluations.append(score(wrap=clock.wrap, on_progress=clock))
        speeds.append(clock.fraction_per_second * targets)
    return DatastoreScores(settings, evaluations[0], evaluations[1], speeds[0], speeds[1], own_text)


class ThroughputClock:
    """Measures the speed of scoring from its progress, without the time to build the model."""

    def __init__(self, name: str, wrap: Callable[[Model], Model], on_status: Callable[[str], None]) -> None:
        self.name = name
        self._wrap = wrap
        self.on_status = on_status
        self.times = list[tuple[float, float]]()

    def wrap(self, model: Model) -> Model:
        """The model to score; the clock starts when it is built."""
        model = self._wrap(model)
        self.times.append((0.0, time.perf_counter()))
        return model

    def __call__(self, fraction: float) -> None:
        self.times.append((fraction, time.perf_counter()))
        self.on_status(f"{self.name}: {fraction:.0%}")

    @property
    def fraction_per_second(self) -> float:
        """The scored fraction per second; the first batch, which includes reading the text, is excluded if possible."""
        first, start_time = self.times[1 if len(self.times) > 2 else 0]
        last, end_time = self.times[-1]
        return (last - first) / (end_time - start_time)
