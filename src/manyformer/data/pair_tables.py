"""Pairs and labelled texts as rows of two cells, from wherever they are; and which of them are held out."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

from manyformer.data.hub import HubSet, is_hub
from manyformer.data.normalization import NormalizationPair, pairs
from manyformer.data.table_files import ColumnKey, TableRow, is_jsonl, parallel, rows
from manyformer.data.text_files import STDIN, existing_path, keep_stdin
from manyformer.data.text_sources import stamp_of
from manyformer.errors import UserError

NORMALIZATION = "normalization"


class RowTable(ABC):
    """Rows of two cells that can be read again and again."""

    name: str

    @abstractmethod
    def rows(self) -> Iterator[TableRow]:
        """All rows in order."""

    @abstractmethod
    def stamp(self) -> list[str | int]:
        """What changes when the content does, without reading it all."""


class FileTable(RowTable):
    """A TSV or JSONL file."""

    def __init__(self, path: Path, columns: Sequence[ColumnKey]) -> None:
        self._path, self._columns, self.name = path, columns, str(path)

    def rows(self) -> Iterator[TableRow]:
        return rows(self._path, self._columns)

    def stamp(self) -> list[str | int]:
        return [*stamp_of(self._path), *self._columns]


class ParallelTable(RowTable):
    """Two files whose lines correspond."""

    def __init__(self, first: Path, second: Path) -> None:
        self._first, self._second, self.name = first, second, f"{first} and {second}"

    def rows(self) -> Iterator[TableRow]:
        return parallel(self._first, self._second)

    def stamp(self) -> list[str | int]:
        return [*stamp_of(self._first), *stamp_of(self._second)]


class HubTable(RowTable):
    """A Hugging Face data set."""

    def __init__(self, path: str, columns: Sequence[ColumnKey]) -> None:
        self._set, self._columns, self.name = HubSet(path), columns, path

    def rows(self) -> Iterator[TableRow]:
        return self._set.rows(self._columns)

    def stamp(self) -> list[str | int]:
        return [self.name, self._set.fingerprint, *self._columns]


class GeneratedTable(RowTable):
    """The default corpus of pairs; made when first read."""

    name = "generated dates, amounts and numbers in 25 languages, to plain form"

    @cached_property
    def _pairs(self) -> list[NormalizationPair]:
        return pairs()

    def rows(self) -> Iterator[TableRow]:
        return (TableRow(tuple(pair), f"pair {number}") for number, pair in enumerate(self._pairs))

    def stamp(self) -> list[str | int]:
        from importlib.metadata import version

        return [NORMALIZATION, version("babel"), version("unicode-rbnf")]


def table(
    path: str | Sequence[str], columns: Sequence[ColumnKey | None], names: Sequence[str], cache: Path
) -> RowTable:
    """The table at `path`: a file, a pair of files, a data set, the default corpus.

    `columns` are as the user gave them; None means the place in a TSV, the usual `names` elsewhere.
    """
    named = [name if column is None else column for column, name in zip(columns, names, strict=True)]
    numbered = [number if column is None else column for number, column in enumerate(columns)]
    if not isinstance(path, str):
        return ParallelTable(existing_path(path[0]), existing_path(path[1]))
    if path == NORMALIZATION:
        return GeneratedTable()
    if is_hub(path):
        return HubTable(path, named)
    place = keep_stdin(cache / "stdin.txt") if path == STDIN else existing_path(path)
    if place.is_dir():
        raise UserError(
            f"{place}: this is a folder; give a TSV or JSONL file, or hf:{place} for a Hugging Face data set"
        )
    return FileTable(place, named if is_jsonl(place) else numbered)


def hash_fraction(text: str) -> float:
    """A number in [0, 1) that depends on the text alone, capitals set aside: equal texts share their lot."""
    return bytes_fraction(text.casefold().encode())


def bytes_fraction(content: bytes) -> float:
    """A number in [0, 1) that depends on these bytes alone."""
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
