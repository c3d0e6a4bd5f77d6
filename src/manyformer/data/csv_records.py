"""Records of CSV (RFC 4180), whose quoted cells may hold line ends, and of TSV, where a line is a record."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from manyformer.data.text_files import MAX_LINE_CHARACTERS, content_suffix, line_blocks, read_chunks, read_lines
from manyformer.errors import UserError

CSV = ".csv"
MAX_RECORD_CHARACTERS = MAX_LINE_CHARACTERS
"""The longest record that is read: an open quote must not take the rest of a large file."""
_REASONS = {
    "unexpected end of data": "the quote that opens in it is not closed before the end of the file",
    "',' expected after '\"'": "after the quote that closes a cell there is neither a comma nor the end of the line",
    "new-line character seen in unquoted field": "a carriage return stands in it without a line feed, outside of "
    "quotes; let lines end with \\n or \\r\\n",
}


class Record(NamedTuple):
    """The cells of a record, none for a blank line, and its first and last line in the file, counted from 1."""

    cells: list[str]
    first: int
    last: int

    def location(self, name: str) -> str:
        """The place of the record in the file of that name, for messages."""
        if self.first == self.last:
            return f"{name}:{self.first}"
        return f"{name}:{self.first}-{self.last}"


def is_csv(path: Path) -> bool:
    """Whether the file's suffix is that of CSV; every other table but JSONL is TSV."""
    return content_suffix(path) == CSV


def read_records(path: Path) -> Iterator[Record]:
    """The records of a TSV or CSV file, blank lines too. Raises UserError with the lines of what is no record."""
    if is_csv(path):
        return _read_csv(path)
    return _read_tsv(path)


def _read_tsv(path: Path) -> Iterator[Record]:
    # quotes are characters, as in the files of most corpora: only a tab ends a cell, and only a line end a record
    for number, text in read_lines(path):
        yield Record(text.split("\t") if "\t" in text or text.strip() else [], number, number)


def _read_csv(path: Path) -> Iterator[Record]:
    """The records as `csv.reader` gives them, in strict mode."""
    # the limit is that of the process: raised, never lowered, since a cell may be a whole document
    csv.field_size_limit(max(csv.field_size_limit(), MAX_RECORD_CHARACTERS))
    source = _RecordLines(path)
    reader = csv.reader(source.lines(), strict=True)
    first = 1
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            where = Record([], first, max(first, reader.line_num)).location(str(path))
            reason = next((text for part, text in _REASONS.items() if part in str(error)), str(error))
            raise UserError(f"{where}: this is no record of CSV: {reason}") from None
        last = reader.line_num
        source.characters = 0
        source.first = last + 1
        if len(cells) == 1 and not cells[0].strip():
            cells = []
        yield Record(cells, first, last)
        first = last + 1


class _RecordLines:
    """The lines of a file for `csv.reader`, with their line ends, counting the characters of the current record."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.characters = 0
        self.first = 1

    def lines(self) -> Iterator[str]:
        """The lines. Raises UserError for a record that is too long."""
        for block in line_blocks(read_chunks(self.path), str(self.path)):
            for text in block.lines:
                self.characters += len(text)
                if self.characters > MAX_RECORD_CHARACTERS:
                    raise UserError(
                        f"{self.path}:{self.first}: the record that begins here has more than "
                        f"{MAX_RECORD_CHARACTERS:,} characters; is a quote in it not closed?"
                    )
                yield f"{text}\n" if block.are_ended else text
