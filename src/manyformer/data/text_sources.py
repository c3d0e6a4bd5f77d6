"""Running text as documents: each file one document, each JSONL or data set record one document; streamed in parts."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from manyformer.data import stdlib_corpus
from manyformer.data.hub import HubSet, is_hub
from manyformer.data.table_files import is_jsonl, rows
from manyformer.data.text_files import STDIN, chunks, existing_path, folder_files, keep_stdin
from manyformer.errors import UserError


class TextPart(NamedTuple):
    """A stretch of a document's text; a long document comes in several."""

    text: str
    begins: bool
    ends: bool


class TextSource(ABC):
    """Something that holds documents and can be read again and again."""

    name: str

    @abstractmethod
    def parts(self) -> Iterator[TextPart]:
        """All documents in order."""

    @abstractmethod
    def stamp(self) -> list[str | int]:
        """What changes when the content does, without reading it all."""


class PlainTextSource(TextSource):
    """One file, one document."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path)

    def parts(self) -> Iterator[TextPart]:
        begins = True
        held = ""
        for text in chunks(self.path):
            if held:
                # Cut behind a line end where there is one, so that no word is torn between two parts.
                cut = held.rfind("\n") + 1 or len(held)
                yield TextPart(held[:cut], begins, ends=False)
                begins, held = False, held[cut:]
            held += text
        if held:
            yield TextPart(held, begins, ends=True)

    def stamp(self) -> list[str | int]:
        return stamp_of(self.path)


class JsonlSource(TextSource):
    """One JSON object a line, one document each."""

    def __init__(self, path: Path, column: str) -> None:
        self.path, self.name, self._column = path, str(path), column

    def parts(self) -> Iterator[TextPart]:
        for row in rows(self.path, [self._column]):
            if row.cells[0]:
                yield TextPart(row.cells[0], begins=True, ends=True)

    def stamp(self) -> list[str | int]:
        return [*stamp_of(self.path), self._column]


class HubTextSource(TextSource):
    """A Hugging Face data set, one document a record."""

    def __init__(self, path: str, column: str) -> None:
        self.name, self._column = path, column
        self._set = HubSet(path)

    def parts(self) -> Iterator[TextPart]:
        for row in self._set.rows([self._column]):
            if row.cells[0]:
                yield TextPart(row.cells[0], begins=True, ends=True)

    def stamp(self) -> list[str | int]:
        return [self.name, self._column, self._set.fingerprint]


def stamp_of(path: Path) -> list[str | int]:
    """Name, size and time of a file: cheap, and different after any ordinary change."""
    facts = path.stat()
    return [str(path.resolve()), facts.st_size, facts.st_mtime_ns]


def text_sources(path: str | Sequence[str], column: str | None, cache: Path) -> list[TextSource]:
    """The sources that `data.path` names, in order; `cache` keeps standard input, which can be read only once."""
    found: list[TextSource] = []
    for one in [path] if isinstance(path, str) else path:
        found += _named(one, column or "text", cache)
    return found


def _named(path: str, column: str, cache: Path) -> list[TextSource]:
    if path == "stdlib":
        return [PlainTextSource(file) for file in stdlib_corpus.files()]
    if is_hub(path):
        return [HubTextSource(path, column)]
    place = keep_stdin(cache / "stdin.txt") if path == STDIN else existing_path(path)
    if place.is_dir():
        # An empty file in a folder, as Python packages have them, is no document; a folder of them alone is a mistake.
        files = [file for file in folder_files(place) if file.stat().st_size]
        if not files:
            raise UserError(f"{place}: all files in this folder are empty")
        return [_file(file, column) for file in files]
    source = _file(place, column)
    if not any(part.text for part in source.parts()):
        raise UserError(f"{'standard input' if path == STDIN else place}: this file is empty")
    return [source]


def _file(path: Path, column: str) -> TextSource:
    return JsonlSource(path, column) if is_jsonl(path) else PlainTextSource(path)
