"""Building a datastore: the keys of a text, computed by a trained model in one pass that can be resumed."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyformer.data.content_sums import changed_contents, without_sums
from manyformer.data.token_shards import open_shard
from manyformer.datastore.build_job import ContextReader, DatastoreJob, default_folder
from manyformer.datastore.datastore import Datastore
from manyformer.datastore.facts import BUILDING, FACTS, KEYS, TEXT, BuildProgress, DatastoreFacts, entries_at
from manyformer.errors import UserError
from manyformer.files.atomic_files import report_disk_full, reserve_file
from manyformer.files.verified_folder import MANIFEST, VerifiedFolder, file_sum, write_manifest
from manyformer.models.model import CarriedState
from manyformer.system.temporary_folders import temporary_folder
from manyformer.train.process_state import read_state_file, write_state_file
from manyformer.train.run_folder import locked_folder

STATE_FILE = "memory.safetensors"
SECONDS_PER_CHECKPOINT = 5.0
"""Seconds between two checkpoints of the progress: the maximum that is repeated after an interruption."""

CountProgressFn = Callable[[int, int], None]
"""Called with the number of entries done and their total."""


def build(
    job: DatastoreJob,
    out: str | Path | None = None,
    *,
    on_facts: Callable[[DatastoreFacts], None] = lambda facts: None,
    on_progress: CountProgressFn = lambda done, total: None,
) -> Datastore:
    """Build the datastore in the folder `out`, or resume an unfinished one; a finished one is only opened.

    `on_facts` is called with the datastore's facts before keys are computed. Raises UserError if the folder holds
    another datastore or other files, if the disk is too small, and if another process builds the datastore.
    """
    folder = default_folder(job) if out is None else Path(out)
    _check_folder(folder)
    with locked_folder(folder, activity="built"):
        progress = _load_or_start(job, folder)
        facts = job.facts(progress.text)
        on_facts(facts)
        if not (folder / MANIFEST).exists():
            _reserve_key_file(folder, facts)
            _write_keys(job, folder, facts, progress, on_progress)
            facts.write(folder / FACTS)
            with report_disk_full(str(folder)):
                write_manifest(folder, without=[BUILDING, *(path.name for path in folder.glob(f"*-{STATE_FILE}"))])
        _remove_states(folder)
    return Datastore(folder)


def _check_folder(folder: Path) -> None:
    if not folder.is_dir() or (folder / BUILDING).exists():
        return
    file_names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    # the text is written first, so that an interruption may leave only its files
    if set(file_names) - {f"{TEXT}.tokens", f"{TEXT}.offsets"}:
        raise UserError(f"{folder} holds {file_names[0]} and no datastore; choose another folder")


def _load_or_start(job: DatastoreJob, folder: Path) -> BuildProgress:
    """The recorded progress of the folder, or a new record after writing the text."""
    with temporary_folder() as scratch_dir:
        identity = job.identity(scratch_dir)
    progress_file = folder / BUILDING
    if progress_file.exists():
        progress = BuildProgress.read(progress_file)
        if changed := _changed_settings(progress.identity, identity):
            raise UserError(
                f"{progress_file} is of a different datastore (another {' and another '.join(changed)}); choose "
                "another folder, or remove it"
            )
        if not (folder / MANIFEST).exists():
            VerifiedFolder(folder, progress.files).verify()
        return progress
    with report_disk_full(f"the text in {folder}"):
        text = job.write_text(folder)
        files = {path.name: file_sum(path) for path in sorted(folder.glob(f"{TEXT}.*"))}
        progress = BuildProgress(identity=identity, text=text, files=files)
        progress.write(progress_file)
    return progress


def _changed_settings(recorded: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """The names of settings that differ; the sums of a text are compared where both have them."""
    return [
        name
        for name in {**recorded, **current}
        if without_sums(recorded.get(name)) != without_sums(current.get(name))
        or changed_contents(recorded.get(name), current.get(name))
    ]


def _reserve_key_file(folder: Path, facts: DatastoreFacts) -> None:
    """Allocate the key file at full size, so that a disk that is too small is reported at once."""
    file = folder / KEYS
    if file.exists() and file.stat().st_size == facts.key_bytes:
        return
    free = shutil.disk_usage(folder).free
    if free < facts.key_bytes:
        raise UserError(
            f"keys take {facts.key_bytes / 1e6:,.0f} MB, and the disk of {folder} has {free / 1e6:,.0f} MB left; "
            "free some space, or build elsewhere with --out"
        )
    reserve_file(file, facts.key_bytes)


def _write_keys(
    job: DatastoreJob, folder: Path, facts: DatastoreFacts, progress: BuildProgress, on_progress: CountProgressFn
) -> None:
    """Compute and write the key of every entry; keys that are written again after a resume have the same values."""
    shard = open_shard(folder, TEXT, facts.text)
    keys = np.memmap(folder / KEYS, facts.dtype, "r+", shape=(facts.entries, facts.width))
    reader = ContextReader(job, shard)
    offsets = np.asarray(shard.offsets)
    saved_at = time.monotonic()
    for batches in range(_resume(reader.carried, folder, progress) + 1, len(reader) + 1):
        text_positions, batch_keys = reader.read(batches - 1)
        keys[entries_at(offsets, text_positions)] = _cast_keys(batch_keys, facts)
        on_progress(facts.entries * batches // len(reader), facts.entries)
        is_last = batches == len(reader)
        if is_last or time.monotonic() - saved_at > SECONDS_PER_CHECKPOINT:
            keys.flush()
            _save_progress(reader.carried, folder, progress.model_copy(update={"batches": batches}), is_last=is_last)
            saved_at = time.monotonic()


def _resume(carried: CarriedState, folder: Path, progress: BuildProgress) -> int:
    """The number of batches done, after restoring the model's state if there is one and it is needed."""
    name = f"{progress.batches}-{STATE_FILE}"
    if name in progress.files:
        read_state_file(carried, folder / name)
    return progress.batches


def _save_progress(carried: CarriedState, folder: Path, progress: BuildProgress, *, is_last: bool) -> None:
    """Write the model's state unless this is the last batch, then the progress record that refers to it."""
    file = folder / f"{progress.batches}-{STATE_FILE}"
    files = {name: size for name, size in progress.files.items() if not name.endswith(STATE_FILE)}
    with report_disk_full(str(folder)):
        if carried.enabled and not is_last:
            write_state_file(carried, file)
            files[file.name] = file_sum(file)
        progress.model_copy(update={"files": files}).write(folder / BUILDING)
    _remove_states(folder, keep=file)


def _remove_states(folder: Path, *, keep: Path | None = None) -> None:
    """Remove the files of earlier model states."""
    for file in folder.glob(f"*-{STATE_FILE}"):
        if file != keep:
            file.unlink()


def _cast_keys(float_keys: NDArray[np.float32], facts: DatastoreFacts) -> NDArray[Any]:
    """The keys in the precision of the datastore. Raises UserError for keys beyond its range."""
    with np.errstate(over="ignore"):
        cast = float_keys.astype(facts.precision)
    if not np.isfinite(cast).all():
        raise UserError(
            f"keys of this model are beyond {facts.precision} (up to {np.abs(float_keys).max():.3g}); use float32"
        )
    return cast
