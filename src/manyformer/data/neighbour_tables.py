"""Tables of precomputed neighbours: for every token of a text, tokens that followed similar contexts in a datastore."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyformer.data.token_shards import TokenShard
from manyformer.errors import UserError
from manyformer.files.atomic_files import atomic_write_text
from manyformer.type_aliases import IntArray

NOTE_FILE = "neighbours.json"


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
    folder.mkdir(parents=True, exist_ok=True)
    note = _read_note(folder)
    if note and (note["made"], note["k"]) != (origin, k):
        raise UserError(
            f"{folder} holds neighbours from another search ({note['made']}, {note['k']} per token); choose another "
            "folder"
        )
    name = f"{shard.facts.sha256[:16]}.tokens"
    table = np.memmap(folder / name, shard.tokens.dtype, "w+", shape=(len(shard.tokens), k))
    yield table
    table.flush()
    texts = {**note.get("texts", {}), shard.facts.sha256: name}
    atomic_write_text(folder / NOTE_FILE, json.dumps({"made": origin, "k": k, "texts": texts}, indent=1) + "\n")


def open_neighbour_table(folder: str | None, shard: TokenShard) -> NeighbourTable | None:
    """Open the neighbour table of a shard in this folder; None for None. Raises UserError if there is none."""
    if folder is None:
        return None
    note = _read_note(Path(folder))
    if not note:
        raise UserError(
            f"{folder} holds no neighbours; compute them with `manyformer datastore neighbours` (data.neighbours)"
        )
    if shard.facts.sha256 not in note["texts"]:
        raise UserError(
            f"{folder} holds no neighbours for this text with this tokenizer; compute them with "
            "`manyformer datastore neighbours` and a run that has the same data"
        )
    file = Path(folder) / note["texts"][shard.facts.sha256]
    shape = len(shard.tokens), int(note["k"])
    if not file.exists() or file.stat().st_size != shape[0] * shape[1] * shard.tokens.dtype.itemsize:
        raise UserError(f"{file} is missing or truncated; compute the neighbours again")
    return NeighbourTable(np.memmap(file, shard.tokens.dtype, "r", shape=shape), f"{note['made']} k{note['k']}")


def _read_note(folder: Path) -> dict[str, Any]:
    """The content of the folder's note file; empty if it has none."""
    try:
        note: dict[str, Any] = json.loads((folder / NOTE_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError(f"{folder / NOTE_FILE} is damaged ({error}); compute the neighbours again") from error
    return note
