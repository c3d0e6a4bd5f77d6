"""Precomputed neighbours of every token of a text, from which retrieval-augmented models (SPALM) are trained."""

from pathlib import Path

import torch

from manyformer.data.cache_folder import load_prepared
from manyformer.data.neighbour_tables import write_neighbour_table
from manyformer.datastore.build_datastore import CountProgressFn
from manyformer.datastore.build_job import ContextReader, DatastoreJob
from manyformer.datastore.datastore import Datastore
from manyformer.datastore.exact_search import ExcludedRange
from manyformer.errors import UserError
from manyformer.models.weights_fingerprint import weights_fingerprint
from manyformer.type_aliases import IntArray

QUERIES_PER_CHUNK = 512


def find_neighbours(
    job: DatastoreJob,
    store: Datastore,
    out: str | Path,
    *,
    k: int = 4,
    min_distance: int | None = None,
    on_progress: CountProgressFn = lambda done, total: None,
) -> tuple[str, ...]:
    """Write, for every token of the run's splits, the `k` tokens that followed the nearest contexts of the datastore.

    In the text of the datastore itself, contexts of the same document are excluded, or with `min_distance` those up to
    that many tokens away: otherwise the next token itself is among the neighbours and the model learns to copy. Returns
    the names of the splits. Raises UserError if the run's data is missing, or if all contexts would be excluded.
    """
    prepared = load_prepared(job.run.folder / "data")
    if prepared is None:
        raise UserError(f"the data of {job.run.folder} is missing, so there is nothing to find neighbours for")
    exclusion = "document" if min_distance is None else min_distance
    origin = f"{weights_fingerprint(job.model)[:16]} {store.facts.text.sha256[:16]} {exclusion}"
    done, total = 0, sum(len(shard.tokens) for shard in prepared.shards.values())
    for shard in prepared.shards.values():
        is_own_text = shard.facts.sha256 == store.facts.text.sha256
        if is_own_text and min_distance is None and store.facts.text.documents == 1:
            raise UserError(
                "the datastore's text is one document, all contexts of which would be excluded; set `min_distance`"
            )
        reader = ContextReader(job, shard)
        with write_neighbour_table(Path(out), shard, k, origin) as table:
            for index in range(len(reader)):
                text_positions, keys = reader.read(index)
                for start in range(0, len(keys), QUERIES_PER_CHUNK):
                    chunk = slice(start, start + QUERIES_PER_CHUNK)
                    excluded = _own_text_range(store, text_positions[chunk], min_distance) if is_own_text else None
                    entries = store.search(torch.from_numpy(keys[chunk]), k, excluded=excluded).entries
                    table[text_positions[chunk]] = store.next_tokens(entries).numpy()
                on_progress(done + len(shard.tokens) * (index + 1) // len(reader), total)
        done += len(shard.tokens)
    return tuple(prepared.shards)


def _own_text_range(store: Datastore, text_positions: IntArray, min_distance: int | None) -> ExcludedRange:
    """The entries that are excluded for the contexts that end at these positions in the datastore's text."""
    entries = store.entries_at(text_positions)
    if min_distance is not None:
        return ExcludedRange(torch.from_numpy(entries - min_distance), torch.from_numpy(entries + min_distance + 1))
    starts, documents = torch.from_numpy(store.document_entries), torch.from_numpy(store.documents_of(entries))
    return ExcludedRange(starts[documents], starts[documents + 1])
