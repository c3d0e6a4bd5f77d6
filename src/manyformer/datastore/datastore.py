"""Datastores on disk: the keys of contexts and the tokens that followed them, memory-mapped."""

from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.batches import NO_NEIGHBOUR
from manyformer.data.token_shards import open_verified_shard
from manyformer.datastore.exact_search import ExcludedRanges, Neighbours, nearest_entries, with_distances
from manyformer.datastore.facts import (
    INDEX,
    TEXT,
    TUNED,
    DatastoreFacts,
    KNNSettings,
    TunedSettings,
    entries_at,
    key_file,
    open_files,
    read_facts,
)
from manyformer.datastore.faiss_index import KeyIndex, open_index
from manyformer.errors import UserError
from manyformer.files.json_records import DamagedFile
from manyformer.type_aliases import IntArray


@final
class Datastore:
    """A datastore written by `manyformer datastore build`: entry e is the e-th token of the text that has a context.

    Entries are in the order of the text, so that those of a document are contiguous. Keys and text are memory-mapped.
    `probe` is the number of lists that an approximate index searches.
    """

    def __init__(self, folder: str | Path, *, exact: bool = False, probe: int | None = None) -> None:
        self.folder = Path(folder)
        files = open_files(self.folder)
        self.facts: DatastoreFacts = read_facts(files)
        shape = self.facts.entries, self.facts.width
        self.keys = np.memmap(key_file(files, self.facts), self.facts.dtype, "r", shape=shape)
        self.text = open_verified_shard(files, TEXT, self.facts.text)
        self.offsets: IntArray = np.asarray(self.text.offsets)
        if (self.text.lengths < 1).any():
            raise DamagedFile(f"{self.folder / TEXT}.offsets is damaged: a document has no tokens")
        # the entries of document i begin at i and end before i + 1; its first token has no context and is no entry
        self.document_entries: IntArray = self.offsets - np.arange(len(self.offsets))
        if exact:
            self.index: KeyIndex | None = None
        else:
            self.index = open_index(self.folder / INDEX, shape, probe)
        if self.index is None and probe is not None:
            raise UserError(
                f"probe ({probe}) is for an index, and {self.folder} has none: `manyformer datastore index`"
            )

    def __len__(self) -> int:
        return self.facts.entries

    def __deepcopy__(self, memo: dict[int, Any]) -> "Datastore":
        # shared by copies: it is read-only and may be larger than memory
        return self

    def search(self, queries: Float[Tensor, "n d"], k: int, *, excluded: ExcludedRanges | None = None) -> Neighbours:
        """The `k` nearest entries of each query by squared distance, in float32, or in float64 for float64 queries."""
        if not 1 <= k <= len(self):
            raise UserError(f"neighbours ({k}) must be from 1 to {len(self):,}, the entries of {self.folder}")
        queries = queries.detach()
        if queries.dtype != torch.float64:
            queries = queries.float()
        if not len(queries):
            return Neighbours(queries.new_empty(0, k), torch.empty(0, k, dtype=torch.long, device=queries.device))
        if self.index is None:
            entries = nearest_entries(self.keys, queries, k, excluded=excluded)
        else:
            entries = self.index.search(queries, k, excluded=excluded)
        return with_distances(self.keys, queries, entries)

    def text_positions(self, entries: IntArray) -> IntArray:
        """The position in the text of the last token of each entry's context."""
        return entries + self.documents_of(entries)

    def documents_of(self, entries: IntArray) -> IntArray:
        """The index of the document of each entry."""
        return np.searchsorted(self.document_entries[:-1], entries, side="right") - 1

    def entries_at(self, text_positions: IntArray) -> IntArray:
        """The entry whose context ends at each of these positions in the text, none of which ends a document."""
        return entries_at(self.offsets, text_positions)

    def next_tokens(self, entries: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
        """The token that followed each context; `NO_NEIGHBOUR` for entry -1."""
        indices = entries.clamp(min=0).cpu().numpy()
        tokens = np.asarray(self.text.tokens[self.text_positions(indices) + 1], np.int64)
        return torch.from_numpy(tokens).to(entries.device).masked_fill(entries < 0, NO_NEIGHBOUR)

    def context(self, entry: int, context_length: int, continuation_length: int) -> tuple[list[int], int, list[int]]:
        """The end of the entry's context, the token that followed it, and the tokens after that.

        Both ends have at most `context_length` and `continuation_length` tokens.
        """
        document = int(self.documents_of(np.array([entry]))[0])
        text_position = entry + document
        start = int(self.offsets[document])
        stop = int(self.offsets[document + 1])
        first = max(start, text_position + 1 - context_length)
        last = min(stop, text_position + 2 + continuation_length)
        tokens = self.text.tokens[first:last].astype(np.int64).tolist()
        split = text_position + 1 - first
        return tokens[:split], tokens[split], tokens[split + 1 :]

    @property
    def bytes(self) -> int:
        """The size of its files on disk in bytes."""
        return sum(file.stat().st_size for file in self.folder.iterdir() if file.is_file())

    def load_settings(self) -> KNNSettings:
        """The settings saved by tuning, else those of the paper, with at most as many neighbours as entries."""
        file = self.folder / TUNED
        if not file.exists():
            return KNNSettings(min(KNNSettings().neighbours, len(self)))
        return KNNSettings(**TunedSettings.read(file).model_dump())

    def save_settings(self, settings: KNNSettings) -> None:
        """Save these as the settings that `load_settings` returns."""
        TunedSettings(**settings.validated()._asdict()).write(self.folder / TUNED)
