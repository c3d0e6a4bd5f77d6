"""Text sources that stream documents: a file is one document, a JSONL or data set record is one document."""

import os
import sysconfig
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from manyformer.base.errors import UserError
from manyformer.data.pipeline.data_paths import STDIN, STDLIB, data_path, is_hub_dataset
from manyformer.data.pipeline.splits import DataSource, PathOrPaths, path_list
from manyformer.data.pipeline.summary import Finding, Tally, plural
from manyformer.data.storage.content_sums import MAX_FILES, evenly_chosen
from manyformer.data.text.pair_tables import RowTable, open_table
from manyformer.data.text.table_files import is_jsonl
from manyformer.data.text.text_files import file_stamp, folder_files, read_chunks

# Tests are half of the library and unlike the remaining code; `encodings` holds tables of characters, from which a
# small model learns to generate CAPITAL LETTER; the remaining folders are not part of the library proper.
EXCLUDED_FOLDERS = frozenset(
    {"test", "tests", "encodings", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
)
MIN_BYTES = 1_000_000


class TextPart(NamedTuple):
    """A contiguous part of a document's text; a long document is streamed in several parts."""

    text: str
    starts_document: bool
    ends_document: bool


class TextSource(DataSource):
    """A source of documents."""

    @abstractmethod
    def parts(self) -> Iterator[TextPart]:
        """Stream all documents in order."""


class PlainTextSource(TextSource):
    """A text file as one document; `has_sum` False leaves the sampled sum of its content out of its stamp."""

    def __init__(self, path: Path, *, has_sum: bool = True) -> None:
        self.path = path
        self.name = str(path)
        self._has_sum = has_sum
        self._characters: int | None = None

    def limit(self, records: int, characters: int) -> None:
        self._characters = characters

    def _chunks(self) -> Iterator[str]:
        if self._characters is None:
            yield from read_chunks(self.path)
            return
        # chunks are cut at the limit, so that a look at a large file reads its beginning alone
        remaining = self._characters
        for text in read_chunks(self.path):
            yield text[:remaining]
            remaining -= len(text)
            if remaining <= 0:
                self.is_cut_short = remaining < 0 or self.is_cut_short
                return

    def parts(self) -> Iterator[TextPart]:
        starts_document = True
        pending = ""
        for text in self._chunks():
            if pending:
                # Split after a line end where there is one, so that no word is split between two parts.
                boundary = pending.rfind("\n") + 1 or len(pending)
                yield TextPart(pending[:boundary], starts_document, ends_document=False)
                starts_document = False
                pending = pending[boundary:]
            pending += text
        if pending:
            yield TextPart(pending, starts_document, ends_document=True)

    def stamp(self) -> list[str | int]:
        return file_stamp(self.path, has_sum=self._has_sum)


class RecordSource(TextSource):
    """A table with one document per row."""

    def __init__(self, table: RowTable) -> None:
        self._table = table
        self.name = table.name
        self._empty = Tally()

    def limit(self, records: int, characters: int) -> None:
        self._table.limit(records, characters)

    def parts(self) -> Iterator[TextPart]:
        self._empty = Tally()
        for row in self._table.rows():
            if row.cells[0]:
                yield TextPart(row.cells[0], starts_document=True, ends_document=True)
            else:
                self._empty.add(row.location)
        self.is_cut_short = self.is_cut_short or self._table.is_cut_short

    def found(self) -> Iterator[Finding]:
        yield from self._table.found()
        if count := self._empty.count:
            yield Finding(count, f"{plural(count, 'record')} without text left out", self._empty.first)

    def stamp(self) -> list[str | int]:
        return self._table.stamp()


def text_sources(paths: PathOrPaths, column: str | None, cache: Path) -> list[TextSource]:
    """The text sources of `data.path`, in order; standard input is copied to `cache`, as it can be read only once."""
    return [source for path in path_list(paths) for source in _sources_at(path, column or "text", cache)]


def _sources_at(path: str, column: str, cache: Path) -> list[TextSource]:
    if path == STDLIB:
        return [PlainTextSource(file) for file in stdlib_files()]
    if is_hub_dataset(path):
        return [RecordSource(open_table(path, [column], [column], cache))]
    resolved = data_path(path, cache)
    if resolved.is_dir():
        # Empty files, as Python packages have them, are skipped; a folder with nothing else is an error.
        files = [file for file in folder_files(resolved) if file.stat().st_size]
        if not files:
            raise UserError(f"{resolved}: all files in this folder are empty")
        # a corpus may have a million files, and a sum of each would take minutes
        summed = set(evenly_chosen(files, MAX_FILES))
        return [_file_source(file, column, cache, has_sum=file in summed) for file in files]
    source = _file_source(resolved, column, cache)
    # ends at the first character
    if not any(part.text for part in source.parts()):
        raise UserError(f"{'standard input' if path == STDIN else resolved}: this file is empty")
    return [source]


def _file_source(path: Path, column: str, cache: Path, *, has_sum: bool = True) -> TextSource:
    if is_jsonl(path):
        return RecordSource(open_table(str(path), [column], [column], cache))
    return PlainTextSource(path, has_sum=has_sum)


def stdlib_files(folder: Path | None = None) -> list[Path]:
    """The .py files sorted by path. Raises UserError if the library has less than `MIN_BYTES` of source."""
    if folder is None:
        root = Path(sysconfig.get_paths()["stdlib"])
    else:
        root = folder
    paths: list[Path] = []
    for directory, subfolders, names in os.walk(root):
        # Pruned during the walk: site-packages can hold a hundred times as many files.
        subfolders[:] = [name for name in subfolders if name not in EXCLUDED_FOLDERS]
        paths += [Path(directory, name) for name in names if name.endswith(".py")]
    paths.sort(key=lambda path: path.relative_to(root).parts)
    readable = [path for path in paths if path.is_file() and path.stat().st_size and _is_utf8(path)]
    size = sum(path.stat().st_size for path in readable)
    if size < MIN_BYTES:
        raise UserError(
            f"the standard library of this Python ({root}) holds only {size:,} bytes of source text, too little "
            "to learn from; give your own text with data.path=FILE_OR_FOLDER"
        )
    return readable


def _is_utf8(path: Path) -> bool:
    # Some files deliberately declare another encoding.
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True
