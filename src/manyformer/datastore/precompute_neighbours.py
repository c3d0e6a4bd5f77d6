"""Precomputed neighbours of every token of a text, from which retrieval-augmented models (SPALM) are trained."""

from collections.abc import Callable
from pathlib import Path

import torch

from manyformer.data.cache_folder import load_prepared
from manyformer.data.neighbour_tables import write_neighbour_table
from manyformer.data.token_shards import TokenShard
from manyformer.data.tokenizer import Tokenizer
from manyformer.datastore.build_datastore import CountProgressFn
from manyformer.datastore.build_job import ContextReader, DatastoreJob
from manyformer.datastore.datastore import Datastore
from manyformer.datastore.exact_search import ExcludedRanges
from manyformer.datastore.own_text import find_own_text
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

    For documents that overlap with documents of the datastore, these are excluded, or with `min_distance`, if the text
    is that of the datastore, the contexts up to that many tokens away: otherwise the next token itself is among the
    neighbours and the model learns to copy. Returns the names of the splits. Raises UserError if the run's data is
    missing, or if all contexts would be excluded.
    """
    prepared = load_prepared(job.run.folder / "data")
    if prepared is None:
        raise UserError(f"the data of {job.run.folder} is missing, so there is nothing to find neighbours for")
    exclusion = "document" if min_distance is None else min_distance
    origin = f"{weights_fingerprint(job.model)[:16]} {store.facts.text.sha256[:16]} {exclusion}"
    done, total = 0, sum(len(shard.tokens) for shard in prepared.shards.values())
    for shard in prepared.shards.values():
        exclusion_of = _exclusion(shard, store, prepared.tokenizers.source, min_distance)
        reader = ContextReader(job, shard)
        with write_neighbour_table(Path(out), shard, k, origin, prepared.tokenizers.source.vocab) as table:
            for index in range(len(reader)):
                text_positions, keys = reader.read(index)
                for start in range(0, len(keys), QUERIES_PER_CHUNK):
                    chunk = slice(start, start + QUERIES_PER_CHUNK)
                    excluded = exclusion_of(text_positions[chunk])
                    entries = store.search(torch.from_numpy(keys[chunk]), k, excluded=excluded).entries
                    table.write(text_positions[chunk], store.next_tokens(entries).numpy())
                on_progress(done + len(shard.tokens) * (index + 1) // len(reader), total)
        done += len(shard.tokens)
    return tuple(prepared.shards)


def _exclusion(
    shard: TokenShard, store: Datastore, tokenizer: Tokenizer, min_distance: int | None
) -> Callable[[IntArray], ExcludedRanges | None]:
    """A function from positions in the text of `shard` to the entries that are excluded for them."""
    if min_distance is not None and shard.facts.sha256 == store.facts.text.sha256:
        return lambda positions: _entries_around(store.entries_at(positions), min_distance)
    own_text = find_own_text(shard, store, tokenizer)
    if own_text.documents and min_distance is not None:
        raise UserError(
            f"{own_text.documents:,} documents overlap with another text, that of {store.folder}, where no distance is "
            "known; leave out `min_distance`, so that the documents are excluded"
        )
    if int((own_text.stops - own_text.starts).sum(1).max(initial=0)) == len(store):
        raise UserError(
            "the datastore's text is one document, all contexts of which would be excluded; set `min_distance`"
        )
    return own_text.excluded


def _entries_around(entries: IntArray, min_distance: int) -> ExcludedRanges:
    first = torch.from_numpy(entries)[:, None]
    return ExcludedRanges(first - min_distance, first + min_distance + 1)
