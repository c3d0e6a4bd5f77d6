"""Retrieval-augmented models (SPALM): neighbours of a text, computed before training, and searched in decoding."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Int
from torch import Tensor, nn

from manyformer.base.errors import UserError
from manyformer.base.type_aliases import IntArray
from manyformer.data.storage.cache_folder import load_prepared
from manyformer.data.storage.neighbour_tables import write_neighbour_table
from manyformer.data.storage.token_shards import TokenShard
from manyformer.data.tokenizers.tokenizer import Tokenizer
from manyformer.inference.datastore.build_datastore import ContextReader, CountProgressFn, DatastoreJob
from manyformer.inference.datastore.datastore import Datastore
from manyformer.inference.datastore.knn_head import check_fits, find_own_text
from manyformer.inference.datastore.nearest_keys import ExcludedRanges
from manyformer.models import Model, ModelOutput
from manyformer.models.generative_model import as_language_model
from manyformer.models.model import weights_fingerprint
from manyformer.nn.core import State
from manyformer.nn.runtime.training_hooks import uses_neighbours

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
    # in the name of the table's origin, so that tables with other exclusions are not taken for each other
    exclusion = "document" if min_distance is None else min_distance
    origin = f"{weights_fingerprint(job.model)[:16]} {store.facts.text.sha256[:16]} {exclusion}"
    done = 0
    total = sum(len(shard.tokens) for shard in prepared.shards.values())
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
        # in its own text a token's nearest context is its own, whose next token is the answer
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


class RetrievalState(NamedTuple):
    """The states of the retriever and of the model."""

    retriever: State
    model: State


@final
class RetrievalAugmentedModel(nn.Module):
    """`model` with the tokens that followed the `k` nearest contexts of a datastore, searched with keys of `retriever`.

    A language model for `generate` and, in an adapter, for `check`: it has a state and fulfills the contracts of its
    recipe. Raises UserError for a model that does not use neighbours, or for another retriever's datastore.
    """

    def __init__(self, model: Model, retriever: Model, store: Datastore, *, k: int = 4) -> None:
        super().__init__()
        if not uses_neighbours(model):
            raise UserError("this model does not use retrieved tokens (neighbours); the recipe spalm does")
        reader = check_fits(retriever, store).reader
        if model.vocab != reader.vocab:
            raise UserError(
                f"the retriever has a vocabulary of {reader.vocab} tokens and the model one of {model.vocab}: they "
                "must be equal"
            )
        self.model = as_language_model(model, "use retrieved tokens")
        self.retriever = reader
        self.store = store
        self.k = k
        self.vocab = model.vocab
        self.tokenizer = model.tokenizer
        # both read every token, so that the shorter one decides
        max_lengths = [length for length in (model.max_length, retriever.max_length) if length is not None]
        self.max_length = min(max_lengths, default=None)
        self.eval()

    def init_state(self, batch: int, *, capacity: int | None = None) -> RetrievalState:
        """The state before any token."""
        return RetrievalState(
            self.retriever.init_state(batch, capacity=capacity), self.model.init_state(batch, capacity=capacity)
        )

    def forward(
        self,
        tokens: Int[Tensor, "b l"],
        segments: Int[Tensor, "b l"] | None = None,
        state: RetrievalState | None = None,
    ) -> ModelOutput:
        states: Any = (None, None) if state is None else state
        # retrieval is a lookup: nothing is to be learned through it
        with torch.no_grad():
            retrieved = self.retriever.hidden(tokens, segments, states[0])
            keys = retrieved.y[..., -self.store.facts.width :]
            entries = self.store.search(keys.flatten(0, 1), self.k).entries
        neighbours = self.store.next_tokens(entries).view(*tokens.shape, self.k)
        logits, model_state, loss = self.model(tokens, segments, states[1], neighbours=neighbours)
        return ModelOutput(logits, None if state is None else RetrievalState(retrieved.state, model_state), loss)
