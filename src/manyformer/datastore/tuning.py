"""Tuning of kNN interpolation: the neighbours, weight and temperature with the lowest loss on held-out text."""

import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.batches import IGNORE_INDEX, CausalLMBatch
from manyformer.data.opened import EvaluationData
from manyformer.datastore.build_job import DatastoreJob
from manyformer.datastore.context_keys import extract_keys
from manyformer.datastore.datastore import Datastore, KNNSettings
from manyformer.datastore.exact_search import Neighbours
from manyformer.datastore.knn_head import interpolate, neighbour_weights
from manyformer.errors import UserError
from manyformer.evaluate.eval_data import load_file, load_split
from manyformer.models import LanguageModel
from manyformer.models.carried_state import CarriedState

WEIGHTS = tuple(round(0.05 * step, 2) for step in range(20))
TEMPERATURES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
QUERIES_PER_CHUNK = 512
"""The number of contexts per search."""


class TuningResult(NamedTuple):
    """The loss of the text in nats for each setting, in ascending order, and its number of tokens."""

    nats: dict[KNNSettings, float]
    targets: int
    data_name: str

    @property
    def best(self) -> KNNSettings:
        return next(iter(self.nats))


class TuningQueries(NamedTuple):
    """Contexts of held-out text: their keys, the model's log-probability of each next token, and that token."""

    keys: Float[Tensor, "n e"]
    log_probs: Float[Tensor, " n"]
    targets: Int[Tensor, " n"]


def tune(
    job: DatastoreJob,
    store: Datastore,
    *,
    data: str | Sequence[str] | None = None,
    neighbours: Collection[int] | None = None,
    weights: Sequence[float] = WEIGHTS,
    temperatures: Sequence[float] = TEMPERATURES,
    max_tokens: int | None = None,
    on_progress: Callable[[float], None] = lambda fraction: None,
) -> TuningResult:
    """Evaluate all settings on the run's validation data, or on `data`; neighbours are searched once for all of them.

    At most `max_tokens` tokens are used. Nothing is saved: `store.save_settings(result.best)` does that. Raises
    UserError for an empty grid and for settings out of range.
    """
    counts = sorted({min(1024, len(store))} if neighbours is None else set(neighbours))
    grid = [KNNSettings(k, w, t).validated() for k in counts for t in temperatures for w in weights]
    if not grid:
        raise UserError("there is nothing to try: give at least one of neighbours, weights and temperatures")
    sums = torch.zeros(len(counts), len(temperatures), len(weights), dtype=torch.float64)
    num_tokens = 0
    with tempfile.TemporaryDirectory(prefix="manyformer-") as scratch_dir, torch.inference_mode():
        material = evaluation_data(job, data, Path(scratch_dir))
        for fraction, query in read_queries(job, store, material):
            query = (
                query if max_tokens is None else TuningQueries(*(chunk[: max_tokens - num_tokens] for chunk in query))
            )
            num_tokens += len(query.targets)
            for chunk in _split_queries(query):
                neighbours_found = store.search(chunk.keys, counts[-1])
                matches = store.next_tokens(neighbours_found.entries) == chunk.targets[:, None]
                sums += _nats(neighbours_found, matches, chunk.log_probs, counts, temperatures, weights)
            on_progress(fraction if max_tokens is None else max(fraction, num_tokens / max_tokens))
            if max_tokens is not None and num_tokens >= max_tokens:
                break
    nats = dict(zip(grid, sums.flatten().tolist()))
    return TuningResult(dict(sorted(nats.items(), key=lambda item: item[1])), num_tokens, material.name)


def evaluation_data(job: DatastoreJob, data: str | Sequence[str] | None, scratch_dir: Path) -> EvaluationData:
    """The validation data of the run, or the text `data`."""
    if data is None:
        return load_split(job.run, job.folder, "valid")
    return load_file(job.run, job.tokenizers, data, scratch_dir)


def read_queries(
    job: DatastoreJob, store: Datastore, material: EvaluationData
) -> Iterator[tuple[float, TuningQueries]]:
    """Batches of the contexts of a text, each with the fraction of the text that is read with it."""
    assert material.batches is not None
    extraction, head = extract_keys(job.model, store.facts.keys), job.model.head
    reader = LanguageModel(job.model.embed, extraction.body, head).eval()
    carried = CarriedState(reader, rows_continue=material.batches.rows_continue)
    for number, batch in enumerate(material.batches, 1):
        assert isinstance(batch, CausalLMBatch)
        tokens, targets = batch.tokens.to(reader.device), batch.targets.to(reader.device)
        segments = None if batch.segments is None else batch.segments.to(reader.device)
        out = reader.hidden(tokens, segments, carried.state_for(batch))
        carried.state = out.state
        scored = targets != IGNORE_INDEX
        y, scored_targets = out.y[scored], targets[scored]
        chunks = zip(torch.split(y, QUERIES_PER_CHUNK), torch.split(scored_targets, QUERIES_PER_CHUNK))
        log_probs = [head(x[:, : extraction.stream_dim]).log_softmax(-1).gather(1, t[:, None])[:, 0] for x, t in chunks]
        yield (
            number / len(material.batches),
            TuningQueries(y[:, -extraction.key_dim :], torch.cat([y.new_empty(0), *log_probs]), scored_targets),
        )


def _split_queries(query: TuningQueries) -> Iterable[TuningQueries]:
    return (TuningQueries(*parts) for parts in zip(*(torch.split(part, QUERIES_PER_CHUNK) for part in query)))


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
            mixing_weights = all_weights * (neighbour_shares.sum(1) > 0)
            neighbour_probs = (neighbour_shares * matches[:, :count]).sum(1).expand_as(mixing_weights)
            rows.append(
                -interpolate(log_probs.expand_as(mixing_weights), neighbour_probs, mixing_weights).double().sum(1)
            )
    return torch.stack(rows).view(len(counts), len(temperatures), len(weights)).cpu()
