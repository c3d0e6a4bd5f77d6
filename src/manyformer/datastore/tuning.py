"""How much neighbours should count: neighbours, weight and temperature that make held-out text likeliest."""

import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.batches import IGNORE_INDEX, CausalLMBatch
from manyformer.datastore.build_job import DatastoreJob
from manyformer.datastore.context_keys import keyed
from manyformer.datastore.datastore import Datastore, KNNSettings
from manyformer.datastore.exact_search import Neighbours
from manyformer.datastore.knn_head import interpolate, neighbour_weights
from manyformer.errors import UserError
from manyformer.evaluate.eval_data import EvaluationData, file_of, split_of
from manyformer.models import LanguageModel
from manyformer.models.carried_state import CarriedState

WEIGHTS = tuple(round(0.05 * step, 2) for step in range(20))
TEMPERATURES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
CHUNK = 512
"""Contexts whose neighbours are sought at once."""


class TuningResult(NamedTuple):
    """The nats of the text for each setting, the best first, and its number of tokens."""

    nats: dict[KNNSettings, float]
    targets: int
    material: str

    @property
    def best(self) -> KNNSettings:
        return next(iter(self.nats))


class TuningQueries(NamedTuple):
    """Contexts as a language model reads them: keys, the log-probability of each next token, and that token."""

    keys: Float[Tensor, "n e"]
    log_probs: Float[Tensor, " n"]
    targets: Int[Tensor, " n"]


def tune(
    work: DatastoreJob,
    store: Datastore,
    *,
    data: str | Sequence[str] | None = None,
    neighbours: Collection[int] | None = None,
    weights: Sequence[float] = WEIGHTS,
    temperatures: Sequence[float] = TEMPERATURES,
    most: int | None = None,
    each: Callable[[float], None] = lambda share: None,
) -> TuningResult:
    """Try all settings on the run's validation data, or on `data`; neighbours are sought once for all of them.

    `most` is how many tokens to look at. Nothing is kept: `store.tune(found.best)` does that. Raises UserError.
    """
    counts = sorted({min(1024, len(store))} if neighbours is None else set(neighbours))
    grid = [KNNSettings(k, w, t).checked() for k in counts for t in temperatures for w in weights]
    if not grid:
        raise UserError("there is nothing to try: give at least one of neighbours, weights and temperatures")
    sums = torch.zeros(len(counts), len(temperatures), len(weights), dtype=torch.float64)
    seen = 0
    with tempfile.TemporaryDirectory(prefix="manyformer-") as room, torch.inference_mode():
        material = material_of(work, data, Path(room))
        for share, query in queries(work, store, material):
            query = query if most is None else TuningQueries(*(part[: most - seen] for part in query))
            seen += len(query.targets)
            for part in _chunks(query):
                found = store.search(part.keys, counts[-1])
                right = store.following(found.entries) == part.targets[:, None]
                sums += _nats(found, right, part.log_probs, counts, temperatures, weights)
            each(share if most is None else max(share, seen / most))
            if most is not None and seen >= most:
                break
    nats = dict(zip(grid, sums.flatten().tolist()))
    return TuningResult(dict(sorted(nats.items(), key=lambda item: item[1])), seen, material.name)


def material_of(work: DatastoreJob, data: str | Sequence[str] | None, room: Path) -> EvaluationData:
    """Validation data of the run, or any text."""
    if data is None:
        return split_of(work.run, "language-model", work.folder, "valid")
    return file_of(work.run, "language-model", work.tokenizers, data, room)


def queries(work: DatastoreJob, store: Datastore, material: EvaluationData) -> Iterator[tuple[float, TuningQueries]]:
    """The contexts of a text, batch after batch, and the share of the text that is read then."""
    assert material.held is not None
    own, head = keyed(work.model, store.facts.keys), work.model.head
    reader = LanguageModel(work.model.embed, own.body, head).eval()
    memory = CarriedState(reader, goes_on=material.held.goes_on)
    for number, batch in enumerate(material.held, 1):
        assert isinstance(batch, CausalLMBatch)
        tokens, targets = batch.tokens.to(reader.device), batch.targets.to(reader.device)
        segments = None if batch.segments is None else batch.segments.to(reader.device)
        out = reader.hidden(tokens, segments, memory.before(batch))
        memory.state = out.state
        scored = targets != IGNORE_INDEX
        y, wanted = out.y[scored], targets[scored]
        parts = zip(torch.split(y, CHUNK), torch.split(wanted, CHUNK))
        known = [head(x[:, : own.stream]).log_softmax(-1).gather(1, t[:, None])[:, 0] for x, t in parts]
        yield (
            number / len(material.held),
            TuningQueries(y[:, -own.width :], torch.cat([y.new_empty(0), *known]), wanted),
        )


def _chunks(query: TuningQueries) -> Iterable[TuningQueries]:
    return (TuningQueries(*parts) for parts in zip(*(torch.split(part, CHUNK) for part in query)))


def _nats(
    found: Neighbours,
    right: Tensor,
    known: Float[Tensor, " n"],
    counts: Sequence[int],
    temperatures: Sequence[float],
    weights: Sequence[float],
) -> Float[Tensor, "k t w"]:
    """What the targets cost together for each setting; the nearest of many neighbours are those of fewer."""
    rows = []
    all_weights = known.new_tensor(weights)[:, None]
    for count in counts:
        for temperature in temperatures:
            each = neighbour_weights(found.distances[:, :count], temperature)
            weight = all_weights * (each.sum(1) > 0)
            neighbours = (each * right[:, :count]).sum(1).expand_as(weight)
            rows.append(-interpolate(known.expand_as(weight), neighbours, weight).double().sum(1))
    return torch.stack(rows).view(len(counts), len(temperatures), len(weights)).cpu()
