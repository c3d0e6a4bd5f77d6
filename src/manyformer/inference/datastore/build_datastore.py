"""Building a datastore: the keys of a text, computed by a trained model in one pass that can be resumed.

A `DatastoreJob` says what is built: a trained run, a text, and the layer whose inputs are the keys."""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from manyformer.base.context_windows import ContextWindows
from manyformer.base.errors import UserError, suggest_names
from manyformer.base.files.atomic_files import report_disk_full, reserve_file
from manyformer.base.files.json_text import json_text
from manyformer.base.files.verified_folder import MANIFEST, VerifiedFolder, file_sum, write_manifest
from manyformer.base.system import temporary_folder
from manyformer.base.type_aliases import IntArray
from manyformer.config import TextData
from manyformer.data.batching.text_epochs import NextTokenBatches
from manyformer.data.pipeline.opened import EvaluationPath
from manyformer.data.storage.cache_folder import load_prepared
from manyformer.data.storage.content_sums import changed_contents, without_sums
from manyformer.data.storage.token_shards import ShardFacts, TokenShard, open_shard, write_shards
from manyformer.data.text.open_text import make_layout, write_text_shard
from manyformer.data.text.text_sources import text_sources
from manyformer.inference.datastore.context_keys import KeyExtraction, KeyLayer, extract_keys, read_batch
from manyformer.inference.datastore.datastore import (
    BUILDING,
    BYTES,
    FACTS,
    KEYS,
    TEXT,
    BuildProgress,
    Datastore,
    DatastoreFacts,
    KeyPrecision,
    entries_at,
)
from manyformer.inference.evaluate.eval_data import TrainedRun, open_run, task_of_run
from manyformer.inference.evaluate.evaluate import check_context
from manyformer.models import LanguageModel
from manyformer.models.generative_model import as_language_model
from manyformer.models.model import CarriedState, weights_fingerprint
from manyformer.nn.batches import IGNORE_INDEX
from manyformer.training.process_state import read_state_file, write_state_file
from manyformer.training.run_folder import locked_folder

STATE_FILE = "memory.safetensors"
SECONDS_PER_CHECKPOINT = 5.0
"""Seconds between two checkpoints of the progress: the maximum that is repeated after an interruption."""

CountProgressFn = Callable[[int, int], None]
"""Called with the number of entries done and their total."""


@dataclass(frozen=True)
class DatastoreJob:
    """Everything that determines a datastore: model, key layer, precision, text, and how its rows are cut."""

    run: TrainedRun
    data: TextData
    model: LanguageModel
    extraction: KeyExtraction
    key_layer: KeyLayer
    precision: KeyPrecision
    split: str | None
    path: EvaluationPath | None
    weights: str
    windows: ContextWindows | None = None

    @property
    def rows(self) -> int:
        """The number of rows per batch, which in contiguous packing continue each other, as in evaluation."""
        if self.windows is None:
            row_length = self.data.length
        else:
            row_length = self.windows.context
        # at least one row, also where the windows are longer than the run's batches
        return max(1, self.run.config.batch.tokens // row_length)

    @property
    def piece_length(self) -> int | None:
        """The most tokens that a model with a memory reads of a window at once; None for rows that are no windows."""
        if self.windows is None:
            return None
        return self.data.length

    @property
    def source(self) -> str:
        """A description of the text for reports."""
        if self.path is None:
            return f"{self.split} of {self.run.folder}"
        if isinstance(self.path, str):
            return self.path
        return " and ".join(self.path)

    def identity(self, scratch_dir: Path) -> dict[str, Any]:
        """The settings that must be equal for a build to be resumed."""
        if self.path is None:
            stamps: Any = self._open_split().facts.sha256
        else:
            stamps = [source.stamp() for source in text_sources(self.path, self.data.column, scratch_dir)]
        # all that decides which number stands where in the key file
        settings: dict[str, Any] = {"model": self.weights, "keys": self.key_layer, "precision": self.precision}
        settings |= {"length": self.data.length, "packing": self.data.packing, "rows": self.rows, "text": stamps}
        if self.windows is not None:
            settings |= self.windows._asdict()
        # through JSON, because the recorded settings that it is compared with come from a file, where tuples are lists
        normalized: dict[str, Any] = json.loads(json_text(settings))
        return normalized

    def write_text(self, folder: Path) -> ShardFacts:
        """Write the tokens of the text as a shard into `folder`."""
        if self.path is not None:
            return write_text_shard(self.data, self.run.tokenizers.source, self.path, folder).facts
        shard = self._open_split()
        with write_shards(folder, [TEXT], self.run.tokenizers.source.vocab) as writers:
            for start, stop in zip(shard.offsets[:-1], shard.offsets[1:]):
                # copied, because the run's data may be removed, while a datastore shows its text
                writers.shards[TEXT].add(shard.tokens[start:stop].astype(np.int32), starts_document=True)
        # characters and bytes are taken from the run's data, because only tokens are read here
        return writers.facts[TEXT]._replace(characters=shard.facts.characters, bytes=shard.facts.bytes)

    def facts(self, text: ShardFacts) -> DatastoreFacts:
        return DatastoreFacts(
            model=self.weights,
            recipe=self.run.config.recipe,
            keys=self.key_layer,
            width=self.extraction.key_dim,
            precision=self.precision,
            source=self.source,
            text=text,
            vocab=self.run.tokenizers.source.vocab,
            length=self.data.length,
            packing=self.data.packing,
            rows=self.rows,
            context=None if self.windows is None else self.windows.context,
            stride=None if self.windows is None else self.windows.stride,
        )

    def _open_split(self) -> TokenShard:
        prepared = load_prepared(self.run.folder / "data")
        if prepared is None:
            raise UserError(f"the data of {self.run.folder} is missing: give a text with --data")
        if self.split not in prepared.shards:
            suggestion = suggest_names(str(self.split), prepared.shards)
            raise UserError(f"the run in {self.run.folder} has no split '{self.split}'; {suggestion}")
        return prepared.shards[str(self.split)]


def datastore_job(
    run: str | Path,
    *,
    data: EvaluationPath | None = None,
    split: str | None = None,
    keys: KeyLayer = "feed-forward",
    precision: KeyPrecision = "float16",
    windows: ContextWindows | None = None,
    device: str | None = None,
) -> DatastoreJob:
    """The validated job for a run. Raises UserError for a run or settings from which no datastore can be built.

    With `windows` a key is computed from the earlier tokens of a window, else from those of a row as in training.
    """
    trained = open_run(run)
    if data is not None and split is not None:
        raise UserError("give either a split or data, not both")
    if precision not in BYTES:
        raise UserError(f"precision ('{precision}') must be one of {', '.join(BYTES)}")
    if keys not in (names := ("feed-forward", "final")):
        raise UserError(f"keys ('{keys}') must be one of {', '.join(names)}")
    settings = trained.config.data
    if not isinstance(settings, TextData) or task_of_run(trained.config).generates != "continuation":
        raise UserError(f"{run} ({trained.config.recipe}) is not a language model of text, which a datastore needs")
    model = as_language_model(trained.load_model(device), "use a datastore")
    if windows is not None:
        check_context(model, windows, settings.length)
    return DatastoreJob(
        trained,
        settings,
        model,
        extract_keys(model, keys),
        keys,
        precision,
        # a datastore is of the text that the model was trained on unless another one is named
        split="train" if split is None and data is None else split,
        path=data,
        weights=weights_fingerprint(model),
        windows=windows,
    )


class ContextReader:
    """Reads the contexts of a text in batches of rows, carrying the model's memory as in evaluation."""

    def __init__(self, job: DatastoreJob, shard: TokenShard) -> None:
        self.rows = job.rows
        self.key_dim = job.extraction.key_dim
        self.piece_length = job.piece_length
        pad = job.run.tokenizers.target.pad
        layout = make_layout(job.data, shard, job.rows, pad=pad, shifted=True, windows=job.windows)
        self.arrangement = layout.arrange(None)
        self.carried = CarriedState(job.extraction.reader.eval(), rows_continue=self.arrangement.rows_continue)

    def __len__(self) -> int:
        """The number of batches."""
        # rounded up: the last batch may have fewer rows
        return -(-self.arrangement.count // self.rows)

    def read(self, index: int) -> tuple[IntArray, NDArray[np.float32]]:
        """The last position in the text (n,) of each context of a batch that a token follows, and its key (n, d)."""
        rows = np.arange(index * self.rows, min((index + 1) * self.rows, self.arrangement.count))
        batch = NextTokenBatches().make_batch(self.arrangement.rows(rows), ())
        with torch.inference_mode():
            hidden = read_batch(self.carried, batch, piece_length=self.piece_length)
            keys = hidden[:, -self.key_dim :].cpu().float().numpy()
        # only tokens with a target are contexts: the others end a document or are padding
        return self.arrangement.token_indices(rows)[(batch.targets != IGNORE_INDEX).numpy()], keys


def plan(job: DatastoreJob) -> DatastoreFacts:
    """The facts of the datastore that `job` would build; the text is read and counted, and no files remain."""
    with temporary_folder() as scratch_dir:
        return job.facts(job.write_text(scratch_dir))


def default_folder(job: DatastoreJob) -> Path:
    """The default folder of a datastore: inside the folder of its run, named after its text."""
    if isinstance(job.path, str) or job.path is None:
        path = job.path
    else:
        path = job.path[0]
    if path is None:
        name = job.split
    else:
        name = Path(path.removeprefix("hf:")).name.split(".")[0] or "text"
    return job.run.folder / "datastores" / str(name)


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
    # two builds of one folder would write keys of different batches over each other
    with locked_folder(folder, activity="built"):
        progress = _load_or_start(job, folder)
        facts = job.facts(progress.text)
        # before the first key, because a build may take hours and its size decides whether to wait
        on_facts(facts)
        if not (folder / MANIFEST).exists():
            _reserve_key_file(folder, facts)
            _write_keys(job, folder, facts, progress, on_progress)
            facts.write(folder / FACTS)
            with report_disk_full(str(folder)):
                write_manifest(folder, without=[BUILDING, *(path.name for path in folder.glob(f"*-{STATE_FILE}"))])
        # also those that an interruption between the manifest and this line has left
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
    # mapped, because the keys are often larger than memory
    keys = np.memmap(folder / KEYS, facts.dtype, "r+", shape=(facts.entries, facts.width))
    reader = ContextReader(job, shard)
    offsets = np.asarray(shard.offsets)
    saved_at = time.monotonic()
    for batches in range(_resume(reader.carried, folder, progress) + 1, len(reader) + 1):
        text_positions, batch_keys = reader.read(batches - 1)
        # batches hold rows of many documents, so that their entries are anywhere in the file
        keys[entries_at(offsets, text_positions)] = _cast_keys(batch_keys, facts)
        on_progress(facts.entries * batches // len(reader), facts.entries)
        is_last = batches == len(reader)
        if is_last or time.monotonic() - saved_at > SECONDS_PER_CHECKPOINT:
            # before the progress that says these keys are there
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
    # without the state of the previous checkpoint, which is removed below
    files = {name: size for name, size in progress.files.items() if not name.endswith(STATE_FILE)}
    with report_disk_full(str(folder)):
        if carried.enabled and not is_last:
            write_state_file(carried, file)
            files[file.name] = file_sum(file)
        # after the state that it names: an interruption in between leaves the earlier record and its state
        progress.model_copy(update={"files": files}).write(folder / BUILDING)
    _remove_states(folder, keep=file)


def _remove_states(folder: Path, *, keep: Path | None = None) -> None:
    """Remove the files of earlier model states."""
    for file in folder.glob(f"*-{STATE_FILE}"):
        if file != keep:
            file.unlink()


def _cast_keys(float_keys: NDArray[np.float32], facts: DatastoreFacts) -> NDArray[Any]:
    """The keys in the precision of the datastore. Raises UserError for keys beyond its range."""
    # what overflows becomes infinite, and is reported below
    with np.errstate(over="ignore"):
        cast = float_keys.astype(facts.precision)
    if not np.isfinite(cast).all():
        raise UserError(
            f"keys of this model are beyond {facts.precision} (up to {np.abs(float_keys).max():.3g}); use float32"
        )
    return cast
