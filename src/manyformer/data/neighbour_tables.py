"""What was looked up beforehand for every token of a text: tokens that followed like contexts elsewhere."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyformer.data.atomic_files import write_text
from manyformer.data.ragged import IntArray
from manyformer.data.token_shards import TokenShard
from manyformer.errors import UserError

NOTE = "neighbours.json"


class NeighbourTable(NamedTuple):
    """For each token of a shard `k` tokens, 0 where there are fewer, mapped from disk."""

    table: NDArray[Any]
    origin: str
    """Of which datastore and how: other lookups are other data."""

    def at(self, places: IntArray) -> IntArray:
        """What was looked up for the tokens at these places; 0 for padding, -1."""
        return np.where(places[..., None] >= 0, self.table[places].astype(np.int64), 0)


@contextmanager
def writing_lookups(folder: Path, shard: TokenShard, k: int, made: str) -> Iterator[NDArray[Any]]:
    """A table to fill for a shard; the note speaks of it once the block has ended well."""
    folder.mkdir(parents=True, exist_ok=True)
    note = _note(folder)
    if note and (note["made"], note["k"]) != (made, k):
        raise UserError(
            f"{folder} holds neighbours from elsewhere ({note['made']}, {note['k']} each); choose another folder"
        )
    name = f"{shard.facts.sha256[:16]}.tokens"
    table = np.memmap(folder / name, shard.tokens.dtype, "w+", shape=(len(shard.tokens), k))
    yield table
    table.flush()
    known = {**note.get("texts", {}), shard.facts.sha256: name}
    write_text(folder / NOTE, json.dumps({"made": made, "k": k, "texts": known}, indent=1) + "\n")


def lookups_of(folder: str | None, shard: TokenShard) -> NeighbourTable | None:
    """The lookups for a shard in this folder; None for None. Raises UserError where there are none for its text."""
    if folder is None:
        return None
    note = _note(Path(folder))
    if not note:
        raise UserError(f"{folder} holds no neighbours; `manyformer datastore neighbours` finds some (data.neighbours)")
    if shard.facts.sha256 not in note["texts"]:
        raise UserError(
            f"{folder} holds no neighbours for this text as it is tokenized here; find some with "
            "`manyformer datastore neighbours` and a run that has the same data"
        )
    file = Path(folder) / note["texts"][shard.facts.sha256]
    shape = len(shard.tokens), int(note["k"])
    if not file.exists() or file.stat().st_size != shape[0] * shape[1] * shard.tokens.dtype.itemsize:
        raise UserError(f"{file} is missing or cut; find the neighbours anew")
    return NeighbourTable(np.memmap(file, shard.tokens.dtype, "r", shape=shape), f"{note['made']} k{note['k']}")


def _note(folder: Path) -> dict[str, Any]:
    """What the folder holds; nothing where it has no note."""
    try:
        found: dict[str, Any] = json.loads((folder / NOTE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError(f"{folder / NOTE} is damaged ({error}); find the neighbours anew") from error
    return found
