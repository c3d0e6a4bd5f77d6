"""Neighbours of every token of a text, found once: what a model that looks things up learns from (SPALM)."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyformer.data.cache_folder import load_prepared
from manyformer.data.neighbour_tables import writing_lookups
from manyformer.data.open_text import layout_of
from manyformer.data.token_shards import TokenShard
from manyformer.datastore.build_datastore import read_keys
from manyformer.datastore.build_job import DatastoreJob
from manyformer.datastore.context_keys import fingerprint
from manyformer.datastore.datastore import Datastore
from manyformer.datastore.exact_search import ExcludedRange
from manyformer.errors import UserError
from manyformer.models import LanguageModel
from manyformer.models.carried_state import CarriedState

IntArray = NDArray[np.int64]
CHUNK = 512


def find_neighbours(
    work: DatastoreJob,
    store: Datastore,
    out: str | Path,
    *,
    k: int = 4,
    apart: int | None = None,
    each: Callable[[int, int], None] = lambda done, of: None,
) -> tuple[str, ...]:
    """For every token of the run's own splits, the `k` tokens that followed the nearest contexts of the datastore.

    In the text of the datastore itself, contexts of the same document do not count, or with `apart` those up to so many
    tokens away: whoever sees the next token itself learns to copy. Gives the names of the splits. Raises UserError.
    """
    ready = load_prepared(work.folder / "data")
    if ready is None:
        raise UserError(f"the data of {work.folder} is gone, so there is nothing to find neighbours for")
    made = f"{fingerprint(work.model)[:16]} {store.facts.text.sha256[:16]} {'document' if apart is None else apart}"
    total = sum(len(shard.tokens) for shard in ready.shards.values())
    done = 0
    for shard in ready.shards.values():
        same = shard.facts.sha256 == store.facts.text.sha256
        if same and apart is None and store.facts.text.documents == 1:
            raise UserError("the datastore's text is one document, all of which would not count; say how far `apart`")
        with writing_lookups(Path(out), shard, k, made) as table:
            before = done
            for places, found in _found(work, store, shard, k, _ban(store, apart) if same else None):
                table[places] = found
                done += len(places)
                each(done, total)
            done = before + len(shard.tokens)
    return tuple(ready.shards)


BanMaker = Callable[[IntArray], ExcludedRange]


def _ban(store: Datastore, apart: int | None) -> BanMaker:
    """Which entries do not count for contexts that end at given places of the datastore's own text."""
    ends = np.append(store.firsts[1:], len(store))

    def ban(places: IntArray) -> ExcludedRange:
        own = store.entries(places)
        if apart is not None:
            return ExcludedRange(torch.from_numpy(own - apart), torch.from_numpy(own + apart + 1))
        document = store.documents(own)
        return ExcludedRange(torch.from_numpy(store.firsts[document]), torch.from_numpy(ends[document]))

    return ban


def _found(
    work: DatastoreJob, store: Datastore, shard: TokenShard, k: int, ban: BanMaker | None
) -> Iterator[tuple[IntArray, IntArray]]:
    """Batch after batch, places of the text and what was found for them."""
    arrangement = layout_of(work.data, shard, work.rows, shifted=True).arrange(None)
    reader = LanguageModel(work.model.embed, work.keyed.body, work.model.head).eval()
    memory = CarriedState(reader, goes_on=arrangement.goes_on)

    def batch(first: int) -> tuple[IntArray, IntArray]:
        numbers = np.arange(first, min(first + work.rows, arrangement.count))
        places, keys = read_keys(memory, arrangement, numbers, store.facts.width)
        parts: list[Tensor] = []
        for begin in range(0, len(places), CHUNK):
            some = places[begin : begin + CHUNK]
            asked = torch.from_numpy(keys[begin : begin + CHUNK])
            parts.append(store.following(store.search(asked, k, ban=None if ban is None else ban(some)).entries))
        return places, torch.cat([torch.zeros(0, k, dtype=torch.long), *parts]).numpy()

    return map(batch, range(0, arrangement.count, work.rows))
