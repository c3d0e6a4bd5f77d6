"""Precomputed neighbours of every token of a text, from which retrieval-augmented models (SPALM) are trained."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from manyformer.data.cache_folder import load_prepared
from manyformer.data.neighbour_tables import write_neighbour_table
from manyformer.data.open_text import make_layout
from manyformer.data.token_shards import TokenShard
from manyformer.datastore.build_datastore import read_keys
from manyformer.datastore.build_job import DatastoreJob
from manyformer.datastore.context_keys import fingerprint
from manyformer.datastore.datastore import Datastore
from manyformer.datastore.exact_search import ExcludedRange
from manyformer.errors import UserError
from manyformer.models import LanguageModel
from manyformer.models.carried_state import CarriedState
from manyformer.type_aliases import IntArray

QUERIES_PER_CHUNK = 512


def find_neighbours(
    job: DatastoreJob,
    store: Datastore,
    out: str | Path,
    *,
    k: int = 4,
    min_distance: int | None = None,
    on_progress: Callable[[int, int], None] = lambda done, of: None,
) -> tuple[str, ...]:
    """Write, for every token of the run's splits, the `k` tokens that followed the nearest contexts of the datastore.

    In the text of the datastore itself, contexts of the same document are excluded, or with `min_distance` those up to
    that many tokens away: otherwise the next token itself is among the neighbours and the model learns to copy. Returns
    the names of the splits. Raises UserError if the run's data is missing, or if all contexts would be excluded.
    """
    prepared = load_prepared(job.folder / "data")
    if prepared is None:
        raise UserError(f"the data of {job.folder} is missing, so there is nothing to find neighbours for")
    excluded = "document" if min_distance is None else min_distance
    origin = f"{fingerprint(job.model)[:16]} {store.facts.text.sha256[:16]} {excluded}"
    total = sum(len(shard.tokens) for shard in prepared.shards.values())
    done = 0
    for shard in prepared.shards.values():
        is_own_text = shard.facts.sha256 == store.facts.text.sha256
        if is_own_text and min_distance is None and store.facts.text.documents == 1:
            raise UserError(
                "the datastore's text is one document, all contexts of which would be excluded; set `min_distance`"
            )
        with write_neighbour_table(Path(out), shard, k, origin) as table:
            done_before = done
            for text_positions, tokens in _iterate_neighbours(
                job, store, shard, k, _exclude_own_text(store, min_distance) if is_own_text else None
            ):
                table[text_positions] = tokens
                done += len(text_positions)
                on_progress(done, total)
            done = done_before + len(shard.tokens)
    return tuple(prepared.shards)


ExclusionFn = Callable[[IntArray], ExcludedRange]


def _exclude_own_text(store: Datastore, min_distance: int | None) -> ExclusionFn:
    """A function from positions in the datastore's text to the entries excluded for the contexts that end there."""
    document_ends = np.append(store.first_entries[1:], len(store))

    def exclude(text_positions: IntArray) -> ExcludedRange:
        entries = store.entries_at(text_positions)
        if min_distance is not None:
            return ExcludedRange(torch.from_numpy(entries - min_distance), torch.from_numpy(entries + min_distance + 1))
        document = store.documents_of(entries)
        return ExcludedRange(torch.from_numpy(store.first_entries[document]), torch.from_numpy(document_ends[document]))

    return exclude


def _iterate_neighbours(
    job: DatastoreJob, store: Datastore, shard: TokenShard, k: int, exclude: ExclusionFn | None
) -> Iterator[tuple[IntArray, IntArray]]:
    """Batches of positions in the text (n,) and the tokens retrieved for them (n, k)."""
    arrangement = make_layout(job.data, shard, job.rows, shifted=True).arrange(None)
    reader = LanguageModel(job.model.embed, job.extraction.body, job.model.head).eval()
    carried = CarriedState(reader, rows_continue=arrangement.rows_continue)

    def search_batch(start: int) -> tuple[IntArray, IntArray]:
        rows = np.arange(start, min(start + job.rows, arrangement.count))
        text_positions, keys = read_keys(carried, arrangement, rows, store.facts.width)
        chunks: list[Tensor] = []
        for first in range(0, len(text_positions), QUERIES_PER_CHUNK):
            chunk_positions = text_positions[first : first + QUERIES_PER_CHUNK]
            queries = torch.from_numpy(keys[first : first + QUERIES_PER_CHUNK])
            chunks.append(
                store.next_tokens(
                    store.search(queries, k, excluded=None if exclude is None else exclude(chunk_positions)).entries
                )
            )
        return text_positions, torch.cat([torch.zeros(0, k, dtype=torch.long), *chunks]).numpy()

    return map(search_batch, range(0, arrangement.count, job.rows))
