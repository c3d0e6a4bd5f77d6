"""Recordings in folders of files, in tables of files, and in NumPy archives."""

import hashlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from manyformer.config import AudioData
from manyformer.config.data_sections.audio_section import MAX_RATE, MIN_RATE
from manyformer.data.array_archives import array_members, read_array
from manyformer.data.audio_reading import (
    AUDIO_SUFFIXES,
    INT16_SCALE,
    GroupTest,
    Recording,
    RecordingSource,
    SampleArray,
    decode_mu_law,
    every_group,
    read_audio_file,
)
from manyformer.data.content_sums import folder_sum
from manyformer.data.image_reading import files_stamp
from manyformer.data.table_columns import ColumnKey
from manyformer.data.table_files import TableRow, is_jsonl, read_rows
from manyformer.data.text_files import content_suffix, existing_path, file_stamp, selected_files
from manyformer.errors import UserError, suggest_names

FOLDER_GROUP = "folder"


def open_recordings(path: str, data: AudioData, default_label: str) -> RecordingSource:
    """The recordings at a path: a folder, an archive, a table or a single file. Raises UserError for anything else.

    `default_label` is the column of labels or texts where data.label does not name one."""
    resolved = existing_path(path)
    if resolved.is_dir():
        return FolderRecordings(resolved, data)
    if content_suffix(resolved) == ".npz":
        return ArchiveRecordings(resolved, data, default_label)
    if resolved.suffix.lower() in AUDIO_SUFFIXES:
        return FileRecording(resolved)
    return TableRecordings(resolved, data, default_label)


@final
class FileRecording(RecordingSource):
    """A single file without a label."""

    def __init__(self, path: Path) -> None:
        self._path, self.name = path, str(path)

    def stamp(self) -> list[str | int]:
        return file_stamp(self._path)

    def recordings(self, selects: GroupTest = every_group) -> Iterator[Recording]:
        if selects(None):
            yield Recording(*read_audio_file(self._path), None, None, self.name)


@final
class FolderRecordings(RecordingSource):
    """Files whose labels are the names of the innermost folders; the group is the first folder below the root."""

    def __init__(self, root: Path, data: AudioData) -> None:
        self.name, self._root, self._data = str(root), root, data
        self._files = audio_files(root)
        if not self._files:
            suffixes = " ".join(sorted(AUDIO_SUFFIXES))
            raise UserError(f"{root}: this folder has no recordings (searched for {suffixes})")

    def check_settings(self) -> None:
        """Raise UserError for columns, which a folder does not have."""
        data, root = self._data, self._root
        if data.label is not None:
            raise UserError(f"{root}: data.label is a column of a table; the labels of a folder are its folders' names")
        if data.group not in (None, FOLDER_GROUP):
            raise UserError(f"{root}: the recordings of a folder have no {data.group!r}; data.group is {FOLDER_GROUP}")

    def stamp(self) -> list[str | int]:
        return files_stamp(self._root, self._files)

    def recordings(self, selects: GroupTest = every_group) -> Iterator[Recording]:
        for file in self._files:
            folders = file.relative_to(self._root).parts[:-1]
            target = name_label(folders[-1], self._data.names, str(file)) if folders else None
            group = folders[0] if folders else None
            if selects(group):
                yield Recording(*read_audio_file(file), target, group, str(file))


@final
class TableRecordings(RecordingSource):
    """Files that the rows of a table name, relative to its folder, with labels or texts and groups in other columns."""

    def __init__(self, path: Path, data: AudioData, default_label: str) -> None:
        self.name, self._path, self._names = str(path), path, data.names
        numbered = not is_jsonl(path)
        audio = (0 if numbered else "path") if data.audio is None else data.audio
        label = (1 if numbered else default_label) if data.label is None else data.label
        self._columns: list[ColumnKey] = [audio, label] + ([] if data.group is None else [data.group])

    def stamp(self) -> list[str | int]:
        hasher, files = hashlib.sha256(), []
        for row in read_rows(self._path, self._columns):
            files.append(self._file(row))
            facts = files[-1].stat()
            hasher.update(f"{row.cells[0]}\0{facts.st_size}\0{facts.st_mtime_ns}\n".encode())
        return [*file_stamp(self._path), *self._columns, hasher.hexdigest(), folder_sum(files)]

    def recordings(self, selects: GroupTest = every_group) -> Iterator[Recording]:
        for row in read_rows(self._path, self._columns):
            _, target, *groups = row.cells
            location = f"{row.location} ({row.cells[0]})"
            named = name_label(target, self._names, location)
            group = groups[0] if groups else None
            if selects(group):
                yield Recording(*read_audio_file(self._file(row)), named, group, location)

    def _file(self, row: TableRow) -> Path:
        file = Path(row.cells[0]).expanduser()
        resolved = file if file.is_absolute() else self._path.parent / file
        if not resolved.is_file():
            raise UserError(f"{row.location}: there is no recording {resolved}")
        return resolved


@final
class ArchiveRecordings(RecordingSource):
    """Recordings one after another in the array `samples`, as many samples each as `lengths` says.

    Samples are mu-law codes (uint8), 16-bit integers, or floating point numbers from -1 to 1. The other arrays of one
    axis with a value for each recording are its label or text and its group."""

    def __init__(self, path: Path, data: AudioData, default_label: str) -> None:
        self.name, self._path, self._data = str(path), path, data
        self._label = default_label if data.label is None else str(data.label)
        self._members = array_members(path)

    def stamp(self) -> list[str | int]:
        return [*file_stamp(self._path), self._label, str(self._data.group), str(self._data.archive_rate)]

    def recordings(self, selects: GroupTest = every_group) -> Iterator[Recording]:
        samples, lengths = self._array("samples"), self._array("lengths")
        bounds = self._bounds(samples, lengths)
        rate = self._rate()
        targets = self._column(self._label, len(lengths))
        groups = None if self._data.group is None else self._column(str(self._data.group), len(lengths))
        for number, (start, stop) in enumerate(pairwise(bounds)):
            location = f"{self.name}: recording {number}"
            target = name_label(str(targets[number]), self._data.names, location)
            group = None if groups is None else str(groups[number])
            if selects(group):
                yield Recording(_as_samples(samples[start:stop]), rate, target, group, location)

    def _bounds(self, samples: NDArray[Any], lengths: NDArray[Any]) -> NDArray[np.int64]:
        if samples.ndim != 1 or (samples.dtype not in (np.uint8, np.int16) and samples.dtype.kind != "f"):
            raise UserError(
                f"{self.name}: samples must be mu-law codes (uint8), 16-bit integers or floating point numbers in one "
                f"axis, and are {samples.dtype} of shape {samples.shape}"
            )
        if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or (lengths.astype(np.int64) < 0).any():
            raise UserError(f"{self.name}: lengths must be a whole number, at least 0, for each recording")
        bounds = np.concatenate([[0], np.cumsum(lengths.astype(np.int64))])
        if bounds[-1] != len(samples):
            raise UserError(
                f"{self.name}: the lengths of its {len(lengths):,} recordings sum to {bounds[-1]:,}, and it has "
                f"{len(samples):,} samples"
            )
        return bounds

    def _rate(self) -> int:
        """The rate of the archive. Raises UserError where it is unknown, or named twice."""
        if "sample_rate" not in self._members:
            if self._data.archive_rate is None:
                raise UserError(f"{self.name}: it has no array sample_rate; give its rate in Hz as data.archive_rate")
            return self._data.archive_rate
        rate = self._array("sample_rate")
        if rate.size != 1 or rate.dtype.kind not in "iu" or not MIN_RATE <= int(rate.reshape(-1)[0]) <= MAX_RATE:
            raise UserError(f"{self.name}: sample_rate must be a whole number of Hz from {MIN_RATE:,} to {MAX_RATE:,}")
        if self._data.archive_rate not in (None, int(rate.reshape(-1)[0])):
            raise UserError(f"{self.name}: its sample_rate is {rate}, and data.archive_rate is another; leave it out")
        return int(rate.reshape(-1)[0])

    def _column(self, name: str, count: int) -> NDArray[Any]:
        column = self._array(name)
        if column.shape != (count,) or column.dtype.kind not in "iuU":
            raise UserError(
                f"{self.name}: {name} must be a whole number or a text for each of {count:,} recordings, and is "
                f"{column.dtype} of shape {column.shape}"
            )
        return column

    def _array(self, name: str) -> NDArray[Any]:
        if name not in self._members:
            raise UserError(f"{self.name}: there is no array {name} in it; {suggest_names(name, self._members)}")
        return read_array(self._path, self._members[name])


def audio_files(folder: Path) -> list[Path]:
    """The recordings under a folder, sorted by path."""
    return selected_files(folder, lambda file: file.suffix.lower() in AUDIO_SUFFIXES)


def name_label(label: str, names: tuple[str, ...] | None, location: str) -> str:
    """The name of a label that is a number (data.names), or the label. Raises UserError for one without a name."""
    if names is None or label in names:
        return label
    if not label.isdecimal() or int(label) >= len(names):
        raise UserError(f"{location}: the label {label!r} has no name; data.names has those of 0 to {len(names) - 1}")
    return names[int(label)]


def _as_samples(values: NDArray[Any]) -> SampleArray:
    """Samples (n, 1) of the values of an archive."""
    if values.dtype == np.uint8:
        return decode_mu_law(values)[:, None]
    scale = INT16_SCALE if values.dtype == np.int16 else 1
    return values.astype(np.float32)[:, None] / np.float32(scale)
