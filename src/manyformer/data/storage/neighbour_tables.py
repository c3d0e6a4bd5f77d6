"""Tables of precomputed neighbours: for every token of a text, tokens that followed similar contexts in a datastore."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyformer.base.errors import UserError
from manyformer.base.files.atomic_files import make_folder, reserve_file
from manyformer.base.files.json_records import Count, DamagedFile, FileName, FileRecord, PositiveCount, Sha256
from manyformer.base.files.verified_folder import ContentCheck, FileSum, VerifiedFolder, file_sum
from manyformer.base.type_aliases import IntArray
from manyformer.data.storage.token_shards import TokenShard
from manyformer.nn.batches import NO_NEIGHBOUR

NOTE_FILE = "neighbours.json"
_ADDED = 1
"""The number that is added to the tokens of tables that are written now; older ones have 0."""


class NeighbourNote(FileRecord):
    """The tables of a folder: `texts` names the table of each text by its hash, `made` is the search."""

    title: ClassVar[str] = "the description of tables of neighbours"

    made: str
    k: PositiveCount
    added: Count = 0
    """The number that is added to the tokens in the tables, where 0 stands for none."""
    texts: dict[Sha256, FileName]
    files: dict[FileName, FileSum]


class NeighbourTable(NamedTuple):
    """The memory-mapped table (tokens, k) of neighbour tokens of a shard, 0 where there are fewer than k.

    Tokens are stored with `added` added to them: token 0 is a token like others in many vocabularies."""

    table: NDArray[Any]
    origin: str
    """The datastore and the search settings, as part of the data's fingerprint."""
    added: int

    def lookup(self, token_indices: IntArray) -> IntArray:
        """The neighbours of the tokens at these indices; `NO_NEIGHBOUR` for none, and at padding (index -1)."""
        stored = self.table[token_indices].astype(np.int64)
        is_token = (token_indices[..., None] >= 0) & (stored > 0)
        return np.where(is_token, stored - self.added, NO_NEIGHBOUR)


class NeighbourWriter(NamedTuple):
    """A table (tokens, k) that is being written."""

    table: NDArray[Any]

    def write(self, token_indices: IntArray, neighbours: IntArray) -> None:
        """The neighbours (n, k) of the tokens at these indices, `NO_NEIGHBOUR` where there are fewer than k."""
        self.table[token_indices] = neighbours + _ADDED


@contextmanager
def write_neighbour_table(
    folder: Path, shard: TokenShard, k: int, origin: str, vocab: int
) -> Iterator[NeighbourWriter]:
    """Open a table (tokens, k) of tokens below `vocab` to fill for a shard; the note file lists it only on success."""
    make_folder(folder)
    note = _read_note(folder)
    if note and (note.made, note.k, note.added) != (origin, k, _ADDED):
        raise UserError(
            f"{folder} holds neighbours from another search ({note.made}, {note.k} per token); choose another folder"
        )
    path = folder / f"{shard.facts.sha256[:16]}.tokens"
    shape = (len(shard.tokens), k)
    dtype = _table_dtype(vocab, _ADDED)
    # its space is taken at once: a full disk would end a process that writes to a memory map
    reserve_file(path, math.prod(shape) * dtype.itemsize)
    table = np.memmap(path, dtype, "r+", shape=shape)
    # the note is written last, so a table that was not finished is in no note
    yield NeighbourWriter(table)
    table.flush()
    texts = {**(note.texts if note else {}), shard.facts.sha256: path.name}
    files = {**(note.files if note else {}), path.name: file_sum(path)}
    NeighbourNote(made=origin, k=k, added=_ADDED, texts=texts, files=files).write(folder / NOTE_FILE)


def open_neighbour_table(folder: str | None, shard: TokenShard, vocab: int) -> NeighbourTable | None:
    """Open the neighbour table of a shard in this folder, with tokens below `vocab`; None for None.

    Raises UserError if there is none, and DamagedFile.
    """
    if folder is None:
        return None
    note = _read_note(Path(folder))
    if not note:
        raise UserError(
            f"{folder} holds no neighbours; compute them with `manyformer datastore neighbours` (data.neighbours)"
        )
    if shard.facts.sha256 not in note.texts:
        raise UserError(
            f"{folder} holds no neighbours for this text with this tokenizer; compute them with "
            "`manyformer datastore neighbours` and a run that has the same data"
        )
    name = note.texts[shard.facts.sha256]
    shape = (len(shard.tokens), note.k)
    # tables from before tokens were shifted have the type of the shard
    if note.added:
        dtype = _table_dtype(vocab, note.added)
    else:
        dtype = shard.tokens.dtype
    size = shape[0] * shape[1] * dtype.itemsize
    if name in note.files and note.files[name].size != size:
        counts = f"{shape[0]:,} tokens with {note.k:,} neighbours take {size:,} bytes"
        raise DamagedFile(f"{Path(folder) / name} is damaged: {counts}, and it has {note.files[name].size:,}")

    def check_tokens(path: Path) -> None:
        # neighbours are tokens of the datastore's text, which has the vocabulary of the shard
        if np.memmap(path, dtype, "r").max(initial=0) >= vocab + note.added:
            raise DamagedFile(f"{path} is damaged: it holds tokens that are not in the vocabulary of {vocab:,}")

    check = ContentCheck(f"{dtype} below {vocab + note.added}", check_tokens)
    path = VerifiedFolder(Path(folder), note.files).file(name, check)
    return NeighbourTable(np.memmap(path, dtype, "r", shape=shape), f"{note.made} k{note.k}", note.added)


def _table_dtype(vocab: int, added: int) -> np.dtype[Any]:
    return np.min_scalar_type(vocab - 1 + added).newbyteorder("<")


def _read_note(folder: Path) -> NeighbourNote | None:
    """The content of the folder's note file; None if it has none."""
    if (folder / NOTE_FILE).exists():
        return NeighbourNote.read(folder / NOTE_FILE)
    return None
