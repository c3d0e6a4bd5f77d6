"""Recordings in folders of files, in tables of files, and in NumPy archives."""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from manyformer.base.errors import UserError, suggest_names
from manyformer.config import AudioData
from manyformer.config.data_sections.untokenized_sections import MAX_RATE, MIN_RATE
from manyformer.data.audio.audio_reading import (
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
from manyformer.data.pipeline.summary import Finding, TableFindings
from manyformer.data.storage.array_archives import array_members, read_array
from manyformer.data.storage.content_sums import folder_sum
from manyformer.data.text.table_columns import find_columns
from manyformer.data.text.table_files import ColumnKey, TableRow, is_jsonl, read_records, read_rows
from manyformer.data.text.text_files import content_suffix, existing_path, file_stamp, files_stamp, selected_files

FOLDER_GROUP = "folder"


def open_recordings(path: str, data: AudioData, target: str) -> RecordingSource:
    """The recordings at a path: a folder, an archive, a table or a single file. Raises UserError for anything else.

    `target` is what a recording has, a "label" or a "text": the name of its column where data.label gives none."""
    resolved = existing_path(path)
    if resolved.is_dir():
        return FolderRecordings(str(resolved), resolved, audio_files(resolved), data)
    if content_suffix(resolved) == ".npz":
        return ArchiveRecordings(resolved, data, target)
    if resolved.suffix.lower() in AUDIO_SUFFIXES:
        return FolderRecordings(str(resolved), resolved.parent, [resolved], data)
    return TableRecordings(resolved, data, target)


@final
class FolderRecordings(RecordingSource):
    """Files in the folder `root` whose labels are the names of the innermost folders below it.

    The group is the first folder below the root."""

    def __init__(self, name: str, root: Path, files: list[Path], data: AudioData) -> None:
        self.name = name
        self._root = root
        self._files = files
        self._data = data
        if not files:
            suffixes = " ".join(sorted(AUDIO_SUFFIXES))
            raise UserError(f"{root}: this folder has no recordings (searched for {suffixes})")

    def check_settings(self) -> None:
        """Raise UserError for columns, which a folder does not have."""
        data = self._data
        root = self._root
        if data.label is not None:
            raise UserError(f"{root}: data.label is a column of a table; the labels of a folder are its folders' names")
        if data.group not in (None, FOLDER_GROUP):
            raise UserError(f"{root}: the recordings of a folder have no {data.group!r}; data.group is {FOLDER_GROUP}")

    def stamp(self) -> list[str | int]:
        return files_stamp(self._root, self._files)

    def recordings(self, selects: GroupTest = every_group) -> Iterator[Recording]:
        for file in self._files:
            # speaker/label/file.wav: the first folder is the group, the last one the label
            folders = file.relative_to(self._root).parts[:-1]
            target = None
            if folders:
                target = name_label(folders[-1], self._data.names, str(file))
            group = folders[0] if folders else None
            if selects(group):
                yield Recording(*read_audio_file(file), target, group, str(file))


@final
class TableRecordings(RecordingSource):
    """Files that the rows of a table name, relative to its folder, with labels or texts and groups in other columns.

    The columns of a TSV or CSV are found by `find_columns`; a first row that names a file that exists is no header."""

    def __init__(self, path: Path, data: AudioData, target: str) -> None:
        self.name = str(path)
        self._path = path
        self._names = data.names
        self._findings = TableFindings()
        self._header = data.header
        self._columns: list[ColumnKey]
        self._stamp: list[ColumnKey]
        # the group is read only where it is asked for: most tables have none
        keys = [data.audio, data.label] + ([] if data.group is None else [data.group])
        roles = ["audio", "label" if target == "label" else "transcript", "group"][: len(keys)]
        self._has_header = False
        if is_jsonl(path):
            defaults = ["path", target, "group"]
            self._columns = [default if key is None else key for key, default in zip(keys, defaults)]
            self._stamp = list(self._columns)
            return
        header = data.header
        # the surest sign of a row: the file that it names is there
        if header is None and not any(isinstance(key, str) for key in keys) and self._starts_with_row(keys):
            header = False
        table_columns = find_columns(path, keys, roles, header=header)
        self._has_header = table_columns.has_header
        self.notes = table_columns.notes
        self._columns = [index for index in table_columns.indices if index is not None]
        # the stamp of a file that is read by the settings alone is that of versions that knew no headers
        is_plain = not table_columns.has_header or (any(isinstance(key, str) for key in keys) and None not in keys)
        places = [number if key is None else key for number, key in enumerate(keys)]
        self._stamp = [*places, *([] if is_plain else ["header", *(str(column) for column in self._columns)])]

    def found(self) -> Iterator[Finding]:
        return self._findings.found()

    def _starts_with_row(self, keys: Sequence[ColumnKey | None]) -> bool:
        """Whether the first line names a recording that exists, so that it is no header."""
        column = keys[0] if isinstance(keys[0], int) else 0
        first = next(iter(read_records(self._path)), None)
        return first is not None and len(first.cells) > column and self._resolved(first.cells[column]).is_file()

    def _rows(self) -> Iterator[TableRow]:
        self._findings = TableFindings()
        return read_rows(self._path, self._columns, has_header=self._has_header, findings=self._findings)

    def stamp(self) -> list[str | int]:
        hasher = hashlib.sha256()
        files = []
        for row in self._rows():
            files.append(self._file(row))
            # the table may be unchanged while a recording was replaced
            facts = files[-1].stat()
            hasher.update(f"{row.cells[0]}\0{facts.st_size}\0{facts.st_mtime_ns}\n".encode())
        return [*file_stamp(self._path), *self._stamp, hasher.hexdigest(), folder_sum(files)]

    def recordings(self, selects: GroupTest = every_group) -> Iterator[Recording]:
        for row in self._rows():
            _, target, *groups = row.cells
            location = f"{row.location} ({row.cells[0]})"
            named = name_label(target, self._names, location)
            group = groups[0] if groups else None
            if selects(group):
                yield Recording(*read_audio_file(self._file(row)), named, group, location)

    def _file(self, row: TableRow) -> Path:
        resolved = self._resolved(row.cells[0])
        if not resolved.is_file():
            is_first = not self._has_header and self._header is None and not is_jsonl(self._path)
            may_be_header = is_first and row.location == f"{self._path}:1"
            hint = ""
            if may_be_header:
                hint = "; if this line names the columns, set data.header=true"
            raise UserError(f"{row.location}: there is no recording {resolved}{hint}")
        return resolved

    def _resolved(self, name: str) -> Path:
        file = Path(name).expanduser()
        if file.is_absolute():
            return file
        return self._path.parent / file


@final
class ArchiveRecordings(RecordingSource):
    """Recordings one after another in the array `samples`, as many samples each as `lengths` says.

    Samples are mu-law codes (uint8), 16-bit integers, or floating point numbers from -1 to 1. The other arrays of one
    axis with a value for each recording are its label or text and its group."""

    def __init__(self, path: Path, data: AudioData, target: str) -> None:
        self.name = str(path)
        self._path = path
        self._data = data
        self._label = target if data.label is None else str(data.label)
        # headers alone, so that opening costs nothing
        self._members = array_members(path)

    def stamp(self) -> list[str | int]:
        return [*file_stamp(self._path), self._label, str(self._data.group), str(self._data.archive_rate)]

    def recordings(self, selects: GroupTest = every_group) -> Iterator[Recording]:
        samples = self._array("samples")
        lengths = self._array("lengths")
        bounds = self._bounds(samples, lengths)
        rate = self._rate()
        targets = self._column(self._label, len(lengths))
        groups = None
        if self._data.group is not None:
            groups = self._column(str(self._data.group), len(lengths))
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
        # as 64-bit numbers: sums of 32-bit lengths may overflow
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
    # floating point samples are between -1 and 1 already
    scale = INT16_SCALE if values.dtype == np.int16 else 1
    return values.astype(np.float32)[:, None] / np.float32(scale)
