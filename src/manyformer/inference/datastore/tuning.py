"""Tuning of kNN interpolation: the neighbours, weight and temperature with the lowest loss on held-out text.

`score_datastore` compares scores and speed of a text with and without the datastore."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.base.errors import UserError
from manyformer.data.pipeline.opened import EvaluationData
from manyformer.data.storage.token_shards import shard_units
from manyformer.inference.datastore.build_datastore import DatastoreJob
from manyformer.inference.datastore.context_keys import extract_keys, read_batch
from manyformer.inference.datastore.datastore import Datastore, KNNSettings
from manyformer.inference.datastore.knn_head import (
    OwnText,
    OwnTextModel,
    check_fits,
    check_own_text,
    interpolate,
    knn_lm,
    neighbour_weights,
)
from manyformer.inference.datastore.nearest_keys import Neighbours
from manyformer.inference.evaluate import Evaluation, evaluate
from manyformer.inference.evaluate.eval_data import open_run
from manyformer.models import Model
from manyformer.models.model import CarriedState
from manyformer.models.scores import is_comparable, rank_key
from manyformer.nn.batches import IGNORE_INDEX, CausalLMBatch

WEIGHTS = tuple(round(0.05 * step, 2) for step in range(20))
TEMPERATURES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
QUERIES_PER_CHUNK = 512
"""The number of contexts per search."""


class TuningResult(NamedTuple):
    """The loss of the text in nats for each setting, in ascending order, and its number of tokens.

    `own_text` are the documents of the text that overlap with the datastore, which were excluded.
    """

    nats: dict[KNNSettings, float]
    targets: int
    data_name: str
    own_text: OwnText

    @property
    def best(self) -> KNNSettings:
        return next(iter(self.nats))


class TuningQueries(NamedTuple):
    """Contexts of held-out text: their keys, the model's log-probability of each next token, and that token.

    `text_positions` are the positions of the contexts' last tokens in the text.
    """

    keys: Float[Tensor, "n e"]
    log_probs: Float[Tensor, " n"]
    targets: Int[Tensor, " n"]
    text_positions: Int[Tensor, " n"]


def tune(
    job: DatastoreJob,
    store: Datastore,
    *,
    data: str | Sequence[str] | None = None,
    neighbours: Collection[int] | None = None,
    weights: Sequence[float] = WEIGHTS,
    temperatures: Sequence[float] = TEMPERATURES,
    max_tokens: int | None = None,
    exclude_own: bool = False,
    on_progress: Callable[[float], None] = lambda fraction: None,
) -> TuningResult:
    """Evaluate all settings on the run's validation data, or on `data`; neighbours are searched once for all of them.

    At most `max_tokens` tokens are used. Nothing is saved: `store.save_settings(result.best)` does that. Raises
    UserError for an empty grid, for settings out of range, and for documents that overlap with the datastore's, unless
    `exclude_own` excludes these from their neighbours.
    """
    counts = sorted({min(1024, len(store))} if neighbours is None else set(neighbours))
    grid = [KNNSettings(k, w, t).validated() for k in counts for t in temperatures for w in weights]
    if not grid:
        raise UserError("there is nothing to try: give at least one of neighbours, weights and temperatures")
    sums = torch.zeros(len(counts), len(temperatures), len(weights), dtype=torch.float64)
    num_tokens = 0
    with job.run.open_data("valid", data, windows=job.windows) as material, torch.inference_mode():
        assert material.text is not None
        tokenizer = job.run.tokenizers.source
        own_text = check_own_text(material.text, material.name, store, tokenizer, exclude_own=exclude_own)
        for fraction, chunk in read_queries(job, store, material):
            if max_tokens is not None:
                # the last chunk is cut, so that the result does not depend on the size of chunks
                chunk = TuningQueries(*(part[: max_tokens - num_tokens] for part in chunk))
            num_tokens += len(chunk.targets)
            excluded = own_text.excluded(chunk.text_positions.numpy())
            # once for the largest number: smaller ones are a prefix of it
            nearest = store.search(chunk.keys, counts[-1], excluded=excluded)
            matches = store.next_tokens(nearest.entries) == chunk.targets[:, None]
            sums += _nats(nearest, matches, chunk.log_probs, counts, temperatures, weights)
            on_progress(fraction if max_tokens is None else max(fraction, num_tokens / max_tokens))
            if max_tokens is not None and num_tokens >= max_tokens:
                break
    nats = dict(zip(grid, sums.flatten().tolist()))
    if not any(map(is_comparable, nats.values())):
        raise UserError(f"no setting has a finite loss on {material.name}: the model's own predictions are not finite")
    # settings whose loss is not finite come last
    ranked = sorted(nats.items(), key=lambda item: rank_key(item[1]))
    return TuningResult(dict(ranked), num_tokens, material.name, own_text)


def read_queries(
    job: DatastoreJob, store: Datastore, material: EvaluationData
) -> Iterator[tuple[float, TuningQueries]]:
    """The contexts of a text in chunks for one search each, with the fraction of the text that was read by then."""
    assert material.batches is not None
    reader, stream_dim, key_dim = extract_keys(job.model, store.facts.keys)
    head = job.model.head
    carried = CarriedState(reader.eval(), rows_continue=material.batches.rows_continue)
    for number, batch in enumerate(material.batches, 1):
        assert isinstance(batch, CausalLMBatch)
        assert batch.text_positions is not None
        is_scored = batch.targets != IGNORE_INDEX
        hidden = read_batch(carried, batch, piece_length=job.piece_length)
        parts = hidden, batch.targets[is_scored].to(reader.device), batch.text_positions[is_scored]
        for x, targets, text_positions in zip(*(torch.split(part, QUERIES_PER_CHUNK) for part in parts)):
            log_probs = head(x[:, :stream_dim]).log_softmax(-1).gather(1, targets[:, None])[:, 0]
            yield number / len(material.batches), TuningQueries(x[:, -key_dim:], log_probs, targets, text_positions)


def _nats(
    nearest: Neighbours,
    matches: Tensor,
    log_probs: Float[Tensor, " n"],
    counts: Sequence[int],
    temperatures: Sequence[float],
    weights: Sequence[float],
) -> Float[Tensor, "k t w"]:
    """The summed loss of the targets in nats for each setting; smaller counts use a prefix of the neighbours."""
    rows = []
    all_weights = log_probs.new_tensor(weights)[:, None]
    for count in counts:
        for temperature in temperatures:
            neighbour_shares = neighbour_weights(nearest.distances[:, :count], temperature)
            # without any neighbour the model's distribution stays as it is
            mixing_weights = all_weights * (neighbour_shares.sum(1) > 0)
            neighbour_probs = (neighbour_shares * matches[:, :count]).sum(1).expand_as(mixing_weights)
            mixed = interpolate(log_probs.expand_as(mixing_weights), neighbour_probs, mixing_weights)
            # summed in float64 on the host: differences between settings are small beside the sum
            rows.append(-mixed.cpu().double().sum(1))
    return torch.stack(rows).view(len(counts), len(temperatures), len(weights))


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
    # before the first evaluation, which may take minutes
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
        # loading the model is no part of the speed
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
