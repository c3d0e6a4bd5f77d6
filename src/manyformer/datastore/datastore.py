"""A datastore: contexts by their keys, each with the token that followed it, on disk and mapped when it is used."""

import json
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from manyformer.data.atomic_files import write_text
from manyformer.data.token_shards import open_shard
from manyformer.datastore.exact_search import ExcludedRange, Neighbours, measured, nearest
from manyformer.datastore.facts import INDEX, KEYS, TEXT, TUNED, DatastoreFacts, entries_at, read_facts
from manyformer.datastore.faiss_index import KeyIndex, open_index
from manyformer.errors import UserError

IntArray = NDArray[np.int64]


class KNNSettings(NamedTuple):
    """How much neighbours count: `weight` is lambda of the paper, `temperature` divides squared distances."""

    neighbours: int = 1024
    weight: float = 0.25
    temperature: float = 1.0

    def changed(self, neighbours: int | None, weight: float | None, temperature: float | None) -> "KNNSettings":
        """The same but for what is given. Raises UserError for numbers that mean nothing."""
        return KNNSettings(
            self.neighbours if neighbours is None else neighbours,
            self.weight if weight is None else weight,
            self.temperature if temperature is None else temperature,
        ).checked()

    def checked(self) -> "KNNSettings":
        """Itself. Raises UserError for numbers that mean nothing."""
        if self.neighbours < 1:
            raise UserError(f"neighbours ({self.neighbours}) must be at least 1")
        if not 0 <= self.weight <= 1:
            raise UserError(f"weight ({self.weight}) must lie between 0 and 1: it is the share of the neighbours")
        if not 0 < self.temperature < float("inf"):
            raise UserError(f"temperature ({self.temperature}) must be greater than 0")
        return self


@final
class Datastore:
    """What `manyformer datastore build` wrote: entry e is the e-th token of the text that a context precedes.

    Entries are in the order of the text, so that those of a document stand together. Keys and text stay on disk; what
    is used is mapped. `probe` is for an approximate index: how many of its lists are looked through.
    """

    def __init__(self, folder: str | Path, *, exact: bool = False, probe: int | None = None) -> None:
        self.folder = Path(folder)
        self.facts: DatastoreFacts = read_facts(self.folder)
        self.keys = np.memmap(self.folder / KEYS, self.facts.kind, "r", shape=(self.facts.entries, self.facts.width))
        self.text = open_shard(self.folder, TEXT, self.facts.text)
        self.offsets: IntArray = np.asarray(self.text.offsets)
        # the last token of each document begins no entry
        self.firsts: IntArray = self.offsets[:-1] - np.arange(len(self.offsets) - 1)
        self.index: KeyIndex | None = None if exact else open_index(self.folder / INDEX, probe)
        if self.index is None and probe is not None:
            raise UserError(
                f"probe ({probe}) is for an index, and {self.folder} has none: `manyformer datastore index`"
            )

    def __len__(self) -> int:
        return self.facts.entries

    def __deepcopy__(self, memo: dict[int, Any]) -> "Datastore":
        # never changed, and larger than memory
        return self

    def search(self, queries: Float[Tensor, "n d"], k: int, *, ban: ExcludedRange | None = None) -> Neighbours:
        """The `k` nearest entries of each query by squared distance; in single precision or what queries have above."""
        if not 1 <= k <= len(self):
            raise UserError(f"neighbours ({k}) must be from 1 to {len(self):,}, the entries of {self.folder}")
        queries = queries.detach()
        queries = queries if queries.dtype == torch.float64 else queries.float()
        if not len(queries):
            return Neighbours(queries.new_empty(0, k), torch.empty(0, k, dtype=torch.long, device=queries.device))
        if self.index is None:
            entries = nearest(self.keys, queries, k, ban=ban)
        else:
            entries = self.index.search(queries, k, ban=ban)
        return measured(self.keys, queries, entries)

    def places(self, entries: IntArray) -> IntArray:
        """Where in the text the last token of each entry's context stands."""
        return entries + self.documents(entries)

    def documents(self, entries: IntArray) -> IntArray:
        """The number of the document of each entry."""
        return np.searchsorted(self.firsts, entries, side="right") - 1

    def entries(self, places: IntArray) -> IntArray:
        """The entry whose context ends at each of these places of the text, which end no document."""
        return entries_at(self.offsets, places)

    def following(self, entries: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
        """The token that followed each context; 0 for entry -1."""
        numbers = entries.clamp(min=0).cpu().numpy()
        tokens = np.asarray(self.text.tokens[self.places(numbers) + 1], np.int64)
        return torch.from_numpy(tokens).to(entries.device).masked_fill(entries < 0, 0)

    def context(self, entry: int, before: int, after: int) -> tuple[list[int], int, list[int]]:
        """Up to `before` tokens of the entry's context, the token that followed it, and up to `after` more."""
        place = int(self.places(np.array([entry]))[0])
        number = int(self.documents(np.array([entry]))[0])
        begin, end = int(self.offsets[number]), int(self.offsets[number + 1])
        tokens = (
            self.text.tokens[max(begin, place + 1 - before) : min(end, place + 2 + after)].astype(np.int64).tolist()
        )
        here = place + 1 - max(begin, place + 1 - before)
        return tokens[:here], tokens[here], tokens[here + 1 :]

    @property
    def bytes(self) -> int:
        """What its files take on the disk."""
        return sum(file.stat().st_size for file in self.folder.iterdir() if file.is_file())

    def mix(self) -> KNNSettings:
        """What tuning found to be best, else what the paper has, with no more neighbours than there are entries."""
        file = self.folder / TUNED
        if not file.is_file():
            return KNNSettings(min(KNNSettings().neighbours, len(self)))
        try:
            return KNNSettings(**json.loads(file.read_text(encoding="utf-8"))).checked()
        except (ValueError, TypeError) as error:
            raise UserError(f"{file} is damaged ({error}); remove it, or tune anew") from error

    def tune(self, mix: KNNSettings) -> None:
        """Keep this as what is best."""
        write_text(self.folder / TUNED, json.dumps(mix.checked()._asdict()) + "\n")
