"""Tables of precomputed neighbours: for every token of a text, tokens that followed similar contexts in a datastore."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyformer.data.token_shards import TokenShard
from manyformer.errors import UserError
from manyformer.files.atomic_files import make_folder, reserve_file
from manyformer.files.json_records import DamagedFile, FileName, FileRecord, PositiveCount, Sha256
from manyformer.files.verified_folder import ContentCheck, FileSum, VerifiedFolder, file_sum
from manyformer.type_aliases import IntArray

NOTE_FILE = "neighbours.json"


class NeighbourNote(FileRecord):
    """The tables of a folder: `texts` names the table of each text by its hash, `made` is the search."""

    title: ClassVar[str] = "the description of tables of neighbours"

    made: str
    k: PositiveCount
    texts: dict[Sha256, FileName]
    files: dict[FileName, FileSum]


class NeighbourTable(NamedTuple):
    """The memory-mapped table (tokens, k) of neighbour tokens of a shard, 0 where there are fewer than k."""

    table: NDArray[Any]
    origin: str
    """The datastore and the search settings, as part of the data's fingerprint."""

    def lookup(self, token_indices: IntArray) -> IntArray:
        """The neighbours of the tokens at these indices; 0 at padding (index -1)."""
        return np.where(token_indices[..., None] >= 0, self.table[token_indices].astype(np.int64), 0)


@contextmanager
def write_neighbour_table(folder: Path, shard: TokenShard, k: int, origin: str) -> Iterator[NDArray[Any]]:
    """Open a table (tokens, k) to fill for a shard; the note file lists it only if the context succeeds."""
    make_folder(folder)
    note = _read_note(folder)
    if note and (note.made, note.k) != (origin, k):
        raise UserError(
            f"{folder} holds neighbours from another search ({note.made}, {note.k} per token); choose another folder"
        )
    path = folder / f"{shard.facts.sha256[:16]}.tokens"
    shape, dtype = (len(shard.tokens), k), shard.tokens.dtype
    reserve_file(path, math.prod(shape) * dtype.itemsize)
    table = np.memmap(path, dtype, "r+", shape=shape)
    yield table
    table.flush()
    texts = {**(note.texts if note else {}), shard.facts.sha256: path.name}
    files = {**(note.files if note else {}), path.name: file_sum(path)}
    NeighbourNote(made=origin, k=k, texts=texts, files=files).write(folder / NOTE_FILE)


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
    name, shape = note.texts[shard.facts.sha256], (len(shard.tokens), note.k)
    size = shape[0] * shape[1] * shard.tokens.dtype.itemsize
    if name in note.files and note.files[name].size != size:
        counts = f"{shape[0]:,} tokens with {note.k:,} neighbours take {size:,} bytes"
        raise DamagedFile(f"{Path(folder) / name} is damaged: {counts}, and it has {note.files[name].size:,}")

    def check_tokens(path: Path) -> None:
        # neighbours are tokens of the datastore's text, which has the vocabulary of the shard
        if np.memmap(path, shard.tokens.dtype, "r").max(initial=0) >= vocab:
            raise DamagedFile(f"{path} is damaged: it holds tokens that are not in the vocabulary of {vocab:,}")

    check = ContentCheck(f"{shard.tokens.dtype} below {vocab}", check_tokens)
    path = VerifiedFolder(Path(folder), note.files).file(name, check)
    return NeighbourTable(np.memmap(path, shard.tokens.dtype, "r", shape=shape), f"{note.made} k{note.k}")


def _read_note(folder: Path) -> NeighbourNote | None:
    """The content of the folder's note file; None if it has none."""
    return NeighbourNote.read(folder / NOTE_FILE) if (folder / NOTE_FILE).exists() else None
