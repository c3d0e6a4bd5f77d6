"""Text for people: tables, in Markdown and with aligned columns, and text of files in a printable form.

What is printable neither controls a terminal nor breaks the lines of a file."""

import re
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import NamedTuple

# controls of terminals, line separators, overrides of the writing direction, and bytes of names that are not UTF-8
_CONTROLS = "\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_IN_TEXT = re.compile(f"[{_CONTROLS}]")
_IN_LINE = re.compile(f"[\t\n{_CONTROLS}]")


class Table(NamedTuple):
    """A titled table of text, the first column of which names the rows."""

    title: str
    headers: list[str]
    rows: list[list[str]]

    @property
    def markdown(self) -> list[str]:
        """Its lines in Markdown, without the title; numbers are aligned to the right."""
        return list(markdown_table(self.headers, self.rows, right=self.headers[1:]))


def markdown_table(
    headers: Sequence[str], rows: Iterable[Iterable[object]], right: Container[str] = ()
) -> Iterator[str]:
    """The lines of a table; columns whose header is in `right` are aligned to the right."""
    marks = ["---:" if header in right else "---" for header in headers]
    for row in (headers, marks, *rows):
        yield "| " + " | ".join(escape_bars(str(cell)).replace("\n", " ") for cell in row) + " |"


def escape_bars(text: str) -> str:
    """Text without the signs that end a cell of a table in Markdown."""
    return text.replace("|", "\\|")


def aligned_table(rows: Sequence[Sequence[str]], *, right: bool = False) -> Iterator[str]:
    """The lines of a table, the headers of which are its first row; its columns are as wide as their longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.rjust(width) if right else cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        # no white space at the ends of lines, which editors remove
        yield "  ".join(cells).rstrip()


def printable(text: str) -> str:
    """The text with control characters as in JSON, such as \\u001b; line breaks and tabs stay."""
    return _IN_TEXT.sub(_escape, text)


def printable_line(text: str) -> str:
    """The text as one line, in which line breaks and tabs are escaped as well."""
    return _IN_LINE.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"
