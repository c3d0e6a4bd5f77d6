"""Datastores on disk: the keys of contexts and the tokens that followed them, memory-mapped.

The records beside them are the facts of a datastore, the progress of building it, and settings found by tuning."""

import math
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, final

import numpy as np
import torch
from annotated_types import Ge, Gt, Le, Lt
from jaxtyping import Float, Int
from numpy.typing import NDArray
from pydantic import model_validator
from torch import Tensor

from manyformer.base.context_windows import ContextWindows
from manyformer.base.errors import UserError
from manyformer.base.files.json_records import (
    AS_OBJECT,
    Count,
    DamagedFile,
    FileName,
    FileRecord,
    PositiveCount,
    Sha256,
)
from manyformer.base.files.verified_folder import MANIFEST, ContentCheck, FileSum, VerifiedFolder
from manyformer.base.type_aliases import IntArray
from manyformer.data.storage.token_shards import ShardFacts, open_verified_shard
from manyformer.inference.datastore.context_keys import KeyLayer
from manyformer.inference.datastore.nearest_keys import (
    ExcludedRanges,
    KeyIndex,
    Neighbours,
    nearest_entries,
    open_index,
    with_distances,
)
from manyformer.nn.batches import NO_NEIGHBOUR

FACTS = "datastore.json"
BUILDING = "building.json"
TUNED = "tuned.json"
KEYS = "keys"
INDEX = "index.faiss"
TEXT = "text"
"""Keys are one flat file; the text is a shard as in the data of a run: its tokens and the offsets of documents. The
manifest lists these files, and is written last."""

KeyPrecision = Literal["float16", "float32"]
BYTES: dict[KeyPrecision, int] = {"float16": 2, "float32": 4}

# Values of keys that are checked at a time.
_BLOCK = 1 << 22


class DatastoreFacts(FileRecord):
    """How a datastore was built: equal facts give equal files."""

    title: ClassVar[str] = "the description of a datastore"
    format_number: ClassVar[int] = 2

    model: Sha256
    """The fingerprint of the weights; `recipe` is for reports."""
    recipe: str
    keys: KeyLayer
    width: PositiveCount
    precision: KeyPrecision
    source: str
    """A description of the text for reports."""
    text: Annotated[ShardFacts, AS_OBJECT]
    vocab: PositiveCount
    length: PositiveCount
    """Tokens per row, as in the run's data; `packing` is how rows are cut, `rows` the number per batch."""
    packing: str
    rows: PositiveCount
    context: PositiveCount | None = None
    stride: PositiveCount | None = None
    """Those of the windows that the text was read in; None for rows."""

    @model_validator(mode="after")
    def _check_text(self) -> Self:
        """Raise ValueError for a text, or for windows, that cannot be those of a datastore."""
        try:
            windows = self.windows
        except UserError as error:
            raise ValueError(str(error)) from error
        if windows is not None and self.stride is None:
            raise ValueError("windows have a stride")
        if self.entries < 1:
            raise ValueError(f"{self.text.tokens:,} tokens in {self.text.documents:,} documents have no context")
        if self.text.largest >= self.vocab:
            raise ValueError(f"the token {self.text.largest:,} is not one of a vocabulary of {self.vocab:,}")
        return self

    @property
    def windows(self) -> ContextWindows | None:
        """The windows that the text was read in; None for rows."""
        return ContextWindows.of(self.context, self.stride)

    @property
    def entries(self) -> int:
        """The number of entries: every token except the first of a document has a context."""
        return self.text.tokens - self.text.documents

    @property
    def key_bytes(self) -> int:
        return self.entries * self.width * BYTES[self.precision]

    @property
    def bytes(self) -> int:
        """The size of all files in bytes, without an index."""
        text = self.text.tokens * np.dtype(self.text.dtype).itemsize + 8 * (self.text.documents + 1)
        return self.key_bytes + text

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the key file."""
        return np.dtype(self.precision).newbyteorder("<")

    def to_json(self) -> dict[str, Any]:
        """The facts as a JSON object for scripts."""
        return {**self.model_dump(mode="json"), "entries": self.entries}


class BuildProgress(FileRecord):
    """How far a build has come: `identity` is what must be equal to resume it, `batches` the number done.

    `files` are the files of the text, and that of the model's state after these batches.
    """

    title: ClassVar[str] = "the progress of building a datastore"
    format_number: ClassVar[int] = 2

    identity: dict[str, Any]
    text: Annotated[ShardFacts, AS_OBJECT]
    batches: Count = 0
    files: dict[FileName, Annotated[FileSum, AS_OBJECT]]


class KNNSettings(NamedTuple):
    """The settings of kNN interpolation: `weight` is lambda of the paper, `temperature` divides squared distances."""

    neighbours: int = 1024
    weight: float = 0.25
    temperature: float = 1.0

    def with_overrides(self, neighbours: int | None, weight: float | None, temperature: float | None) -> "KNNSettings":
        """The settings with the arguments that are not None replaced. Raises UserError for values out of range."""
        arguments: dict[str, Any] = {"neighbours": neighbours, "weight": weight, "temperature": temperature}
        return self._replace(**{name: value for name, value in arguments.items() if value is not None}).validated()

    def validated(self) -> "KNNSettings":
        """The unchanged settings. Raises UserError for values out of range."""
        if self.neighbours < 1:
            raise UserError(f"neighbours ({self.neighbours}) must be at least 1")
        if not 0 <= self.weight <= 1:
            raise UserError(f"weight ({self.weight}) must lie between 0 and 1: it is the weight of the neighbours")
        if not 0 < self.temperature < float("inf"):
            raise UserError(f"temperature ({self.temperature}) must be greater than 0")
        return self


class TunedSettings(FileRecord):
    """The settings that tuning found."""

    title: ClassVar[str] = "the tuned settings of a datastore"

    neighbours: PositiveCount
    weight: Annotated[float, Ge(0), Le(1)]
    temperature: Annotated[float, Gt(0), Lt(math.inf)]


def open_files(folder: Path) -> VerifiedFolder:
    """The files of a finished datastore. Raises UserError if there is none, or if the list of files is damaged."""
    if not folder.is_dir():
        raise UserError(f"there is no datastore {folder}; `manyformer datastore build RUN --out {folder}` builds one")
    if (folder / MANIFEST).exists():
        return VerifiedFolder.open(folder)
    if (folder / BUILDING).exists():
        raise UserError(f"{folder} is not finished: the same `manyformer datastore build` resumes it")
    raise UserError(f"{folder} holds no datastore: {MANIFEST} is missing")


def read_facts(files: VerifiedFolder) -> DatastoreFacts:
    """The facts of a finished datastore. Raises DamagedFile, and UserError for another format."""
    return DatastoreFacts.read(files.file(FACTS))


def key_file(files: VerifiedFolder, facts: DatastoreFacts) -> Path:
    """The file of the keys, which are finite numbers. Raises DamagedFile."""
    path = files.folder / KEYS
    # memory-mapped as another shape, the file would be read without an error
    if KEYS in files and files.sums[KEYS].size != facts.key_bytes:
        counts = f"{facts.entries:,} keys of {facts.width} numbers take {facts.key_bytes:,} bytes"
        raise DamagedFile(f"{path} is damaged: {counts}, and it has {files.sums[KEYS].size:,}")

    def check_finite(path: Path) -> None:
        keys = np.memmap(path, facts.dtype, "r")
        if not all(np.isfinite(keys[start : start + _BLOCK]).all() for start in range(0, len(keys), _BLOCK)):
            raise DamagedFile(f"{path} is damaged: some of its numbers are infinite or none at all")

    return files.file(KEYS, ContentCheck(f"finite {facts.precision}", check_finite))


def entries_at(offsets: NDArray[np.int64], text_positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """The entry whose context ends at each of these positions in a text, none of which ends a document."""
    # no token of its document follows the last one, so that entries lag behind positions by the index of the document
    return text_positions - (np.searchsorted(offsets, text_positions, side="right") - 1)


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
        # distances of half precision would make ties of different neighbours
        if queries.dtype != torch.float64:
            queries = queries.float()
        # faiss does not take an empty array
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
        # a missing neighbour, -1, reads some token, which is masked below
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
        # neither end reaches into a neighbouring document
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
            # a small datastore must work without tuning
            return KNNSettings(min(KNNSettings().neighbours, len(self)))
        return KNNSettings(**TunedSettings.read(file).model_dump())

    def save_settings(self, settings: KNNSettings) -> None:
        """Save these as the settings that `load_settings` returns."""
        TunedSettings(**settings.validated()._asdict()).write(self.folder / TUNED)
