"""Building a datastore: from a trained run and a text to keys on disk, in one pass that goes on after a kill."""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from manyformer.batches import IGNORE_INDEX
from manyformer.data.atomic_files import write_text
from manyformer.data.open_text import layout_of
from manyformer.data.row_layouts import RowArrangement
from manyformer.data.text_epochs import NextTokenBatches
from manyformer.data.token_shards import ShardFacts as ShardFacts
from manyformer.data.token_shards import is_complete, open_shard
from manyformer.datastore.build_job import DatastoreJob, default_folder
from manyformer.datastore.datastore import Datastore
from manyformer.datastore.facts import BUILDING, FACTS, FORMAT, KEYS, TEXT, DatastoreFacts, entries_at
from manyformer.errors import UserError
from manyformer.models import LanguageModel
from manyformer.models.carried_state import CarriedState
from manyformer.train.durable_files import replace_text, room_for
from manyformer.train.run_folder import locked_folder
from manyformer.train.state_checkpoint import read_state, write_state

MEMORY = "memory.safetensors"
PAUSE = 5.0
"""Seconds between two notes of how far it has got: so much is done again after a kill."""

IntArray = NDArray[np.int64]

ProgressFn = Callable[[int, int], None]
"""Told how many entries are done, of how many."""


def _silent(done: int, of: int) -> None:
    pass


def build(
    work: DatastoreJob,
    out: str | Path | None = None,
    *,
    tell: Callable[[DatastoreFacts], None] = lambda facts: None,
    each: ProgressFn = _silent,
) -> Datastore:
    """Build the datastore in the folder `out`, or go on with it; one that is finished already is left as it is.

    `tell` is told what it will be before keys are computed. Raises UserError where the folder holds another datastore
    or anything else, where there is too little room, and where another process builds it.
    """
    folder = default_folder(work) if out is None else Path(out)
    _refuse_foreign(folder)
    with locked_folder(folder, doing="built"):
        begun = _begun(work, folder)
        facts = work.facts(ShardFacts(**begun["text"]))
        tell(facts)
        if not (folder / FACTS).exists():
            _make_room(folder, facts)
            _fill(work, folder, facts, begun, each)
            write_text(folder / FACTS, json.dumps({"format": FORMAT, **facts.json()}, indent=1) + "\n")
        _remove(folder)
    return Datastore(folder)


def _refuse_foreign(folder: Path) -> None:
    if not folder.is_dir() or (folder / BUILDING).exists():
        return
    others = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    # the text comes first, so that a kill may leave it alone
    if set(others) - {f"{TEXT}.tokens", f"{TEXT}.offsets"}:
        raise UserError(f"{folder} holds {others[0]} and no datastore; choose another folder")


def _begun(work: DatastoreJob, folder: Path) -> dict[str, Any]:
    """How far it has got: the note in the folder, or a new one once the text is there."""
    with tempfile.TemporaryDirectory(prefix="manyformer-") as room:
        asked = work.asked(Path(room))
    note = folder / BUILDING
    try:
        found: dict[str, Any] = json.loads(note.read_text(encoding="utf-8"))
        if found["asked"] != asked:
            changed = [name for name in asked if found["asked"].get(name) != asked[name]]
            raise UserError(
                f"{folder} is of another datastore (another {' and another '.join(changed)}); choose another folder, "
                "or remove it"
            )
        if is_complete(folder, TEXT, ShardFacts(**found["text"])):
            return found
    except FileNotFoundError:
        pass
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise UserError(f"{note} is damaged ({error}); remove {folder} and build it anew") from error
    with room_for(f"the text in {folder}"):
        new = {"asked": asked, "text": work.text(folder)._asdict(), "batches": 0}
        replace_text(note, json.dumps(new) + "\n")
    return new


def _make_room(folder: Path, facts: DatastoreFacts) -> None:
    """A file of full size, so that a disk that is too small is told now."""
    file = folder / KEYS
    if file.exists() and file.stat().st_size == facts.key_bytes:
        return
    free = shutil.disk_usage(folder).free
    if free < facts.key_bytes:
        raise UserError(
            f"keys take {facts.key_bytes / 1e6:,.0f} MB, and the disk of {folder} has {free / 1e6:,.0f} MB left; "
            "free some space, or build elsewhere with --out"
        )
    with room_for(str(file)), file.open("wb") as handle:
        # not every system can promise room, but all can tell the size
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle.fileno(), 0, facts.key_bytes)
        handle.truncate(facts.key_bytes)


def _fill(work: DatastoreJob, folder: Path, facts: DatastoreFacts, begun: dict[str, Any], each: ProgressFn) -> None:
    """Write the key of every entry where it belongs; what is written twice is the same both times."""
    shard = open_shard(folder, TEXT, facts.text)
    keys = np.memmap(folder / KEYS, facts.kind, "r+", shape=(facts.entries, facts.width))
    arrangement = layout_of(work.data, shard, work.rows, shifted=True).arrange(None)
    reader = LanguageModel(work.model.embed, work.keyed.body, work.model.head).eval()
    memory = CarriedState(reader, goes_on=arrangement.goes_on)
    offsets, batches = np.asarray(shard.offsets), -(-arrangement.count // work.rows)
    noted = time.monotonic()
    for number in range(_resume(memory, folder, begun), batches):
        numbers = np.arange(number * work.rows, min((number + 1) * work.rows, arrangement.count))
        places, found = read_keys(memory, arrangement, numbers, facts.width)
        keys[entries_at(offsets, places)] = _fitting(found, facts)
        each(facts.entries * (number + 1) // batches, facts.entries)
        if number + 1 == batches or time.monotonic() - noted > PAUSE:
            _note(memory, keys, folder, {**begun, "batches": number + 1})
            noted = time.monotonic()


def read_keys(
    memory: CarriedState, arrangement: RowArrangement, numbers: IntArray, width: int
) -> tuple[IntArray, NDArray[np.float32]]:
    """Of rows of the text, where each context ends that a token follows, and its key."""
    reader, batch = memory.model, NextTokenBatches().batch(arrangement.rows(numbers), ())
    assert isinstance(reader, LanguageModel)
    tokens, segments = batch.tokens.to(reader.device), batch.segments
    segments = None if segments is None else segments.to(reader.device)
    with torch.inference_mode():
        out = reader.hidden(tokens, segments, memory.before(batch))
    memory.state = out.state
    scored = batch.targets != IGNORE_INDEX
    return arrangement.places(numbers)[scored.numpy()], out.y[..., -width:].cpu()[scored].float().numpy()


def _resume(memory: CarriedState, folder: Path, begun: dict[str, Any]) -> int:
    """How many batches are done; what the model remembers of them is read."""
    if begun["batches"] and memory.on:
        file = folder / f"{begun['batches']}-{MEMORY}"
        if not file.exists():
            return 0
        read_state(memory, file)
    return int(begun["batches"])


def _note(memory: CarriedState, keys: np.memmap[Any, Any], folder: Path, begun: dict[str, Any]) -> None:
    """Keys first, then what the model remembers, then the note that speaks of both."""
    keys.flush()
    file = folder / f"{begun['batches']}-{MEMORY}"
    with room_for(str(folder)):
        if memory.on:
            write_state(memory, file)
        replace_text(folder / BUILDING, json.dumps(begun) + "\n")
    _remove(folder, but=file)


def _remove(folder: Path, *, but: Path | None = None) -> None:
    """Remove what the model remembered earlier."""
    for old in folder.glob(f"*-{MEMORY}"):
        if old != but:
            old.unlink()


def _fitting(found: NDArray[np.float32], facts: DatastoreFacts) -> NDArray[Any]:
    """Keys in their precision. Raises UserError where they do not fit."""
    with np.errstate(over="ignore"):
        keys = found.astype(facts.precision)
    if not np.isfinite(keys).all():
        raise UserError(
            f"keys of this model are beyond {facts.precision} (up to {np.abs(found).max():.3g}); use float32"
        )
    return keys
