"""Output of the commands: results on stdout, as a page or as JSON, notes and errors on stderr, formatted numbers.

Names and texts of files may hold control characters, which are escaped wherever they are printed.
"""

import dataclasses
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from manyformer.base.files.json_text import json_text
from manyformer.base.files.text_tables import printable
from manyformer.base.system import discard, shows_all_characters

UNCUT = 10_000
"""The width of a table without wrapped cells."""

MAX_WORD = 2_000
"""The longest word of an error that is printed whole."""
_LONG_WORD = re.compile(rf"\S{{{MAX_WORD + 1},}}")

VISIBLE_WHITESPACE = str.maketrans("\n\t", "⏎⇥")
"""The signs of line breaks and tabs in a cell of a table, which would change its lines and columns."""


class PageTable(NamedTuple):
    """A table, fitted to a terminal, or to `width` characters if the output is not a terminal.

    By default each row is then one full line. The columns `right` (counted from 0) are right-aligned. With `cut` the
    last column is cut on a terminal, so that each row is one line there as well.
    """

    headers: Sequence[str]
    rows: Iterable[Sequence[Any]]
    right: Iterable[int] = ()
    width: int = UNCUT
    cut: bool = False


class Heading(NamedTuple):
    """The title of a section."""

    title: str


class Note(NamedTuple):
    """A line for stderr, so that scripts read only results from stdout."""

    text: str


Block = str | PageTable | Heading | Note
"""A part of a page: lines of the result, or one of the others."""


class Output(NamedTuple):
    """What a command has found: `page` shows it, unless --json asks for `value`; `draw` writes the picture, if any.

    A page that is a generator is made only when it is printed. A command whose result is bad, not `ok`, ends with
    exit code 1.
    """

    value: Any
    page: Iterable[Block]
    picture: Path | None = None
    draw: Callable[[Path], object] | None = None
    ok: bool = True


def print_output(output: Output, *, as_json: bool) -> None:
    """Print what a command has found in the chosen form, and write its picture."""
    if as_json:
        print_json(output.value)
    else:
        print_page(output.page)
    if output.picture is not None and output.draw is not None:
        output.draw(output.picture)
        print_note(f"wrote {output.picture}")


def print_page(page: Iterable[Block]) -> None:
    """Print the parts of a page in their order."""
    for block in page:
        match block:
            case str():
                print_result(*(fit_line(line, sys.stdout) for line in block.split("\n")))
            case PageTable():
                print_table(block)
            case Heading():
                print_heading(block.title)
            case Note():
                print_note(block.text)


def print_result(*lines: str) -> None:
    """Print lines of the result to stdout."""
    print(*map(printable, lines), sep="\n")


def fit_line(line: str, stream: TextIO) -> str:
    """A line of prose, wrapped between words where `stream` is a terminal; a pipe gets it whole.

    Commands stay one line, so that they can be pasted, and so does what is indented, such as code."""
    if line.startswith(("manyformer ", " ")) or not stream.isatty():
        return line
    width = shutil.get_terminal_size().columns
    if len(line) <= width:
        return line
    return textwrap.fill(
        line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )


def print_text(text: str, *, end: str = "\n", file: TextIO | None = None) -> None:
    """Print text that is itself the result, of a model or a file: unchanged, but on a terminal as all other output."""
    stream = sys.stdout if file is None else file
    # a file or a pipe gets the text as it is, control characters included; a terminal would obey them
    print(printable(text) if stream.isatty() else text, end=end, file=stream, flush=True)


def print_note(text: str) -> None:
    """Print a note to stderr, so that scripts read only results from stdout."""
    _print_to_stderr(printable(text))


def print_error(text: str, *, mark: str = "error: ") -> None:
    """Print an error to stderr, each of its lines with the mark; a very long word is cut.

    A line that begins with a space belongs to the one before it, as a line of code does.
    """
    for line in _LONG_WORD.sub(_cut_word, printable(text)).split("\n"):
        _print_to_stderr(line if line.startswith(" ") else f"{mark}{line}")


def _print_to_stderr(line: str) -> None:
    try:
        print(fit_line(line, sys.stderr), file=sys.stderr)
    except OSError:
        # nobody reads it, or its disk is full: no reason to lose the result
        discard(sys.stderr)


def _cut_word(match: re.Match[str]) -> str:
    word = match[0]
    return f"{word[: MAX_WORD // 2]}...{word[-MAX_WORD // 4 :]} ({len(word):,} characters)"


def print_json(value: Any) -> None:
    """Print one JSON document to stdout; infinite numbers and NaN become null, other objects their text."""
    # JSON has an escape for every character, plain text has none: so nothing is lost on such a stream
    escaped = not shows_all_characters(sys.stdout)
    print(printable(json_text(json_form(value), indent=2, ensure_ascii=escaped, default=str)))


def json_line(value: Any) -> str:
    """One line of JSON for stdout; characters that it cannot show are escaped as JSON escapes them."""
    return json_text(json_form(value), ensure_ascii=not shows_all_characters(sys.stdout))


def json_form(value: Any) -> Any:
    """`value` with an object of the fields in the place of each record, and lists in that of arrays."""
    if hasattr(value, "_asdict"):
        # a NamedTuple is a tuple, too, of which JSON would make a list without names
        value = value._asdict()
    elif dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: json_form(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [json_form(part) for part in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    return value


def print_table(table: PageTable) -> None:
    """Print a table to stdout."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    numbers = set(table.right)
    headers = [printable(header) for header in table.headers]
    rows = [[printable(str(cell).translate(VISIBLE_WHITESPACE)) for cell in row] for row in table.rows]
    # a pipe has no width: rows stay whole for `grep` and `cut`
    is_terminal = sys.stdout.isatty()
    console = Console(width=None if is_terminal else table.width)
    cuts = table.cut and is_terminal
    widths = _column_widths([headers, *rows], console.width, cut=cuts)
    drawn = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, show_header=any(headers))
    for index, (header, width) in enumerate(zip(headers, widths, strict=True)):
        is_cut = cuts and index == len(headers) - 1
        drawn.add_column(
            header,
            justify="right" if index in numbers else "left",
            overflow="ellipsis" if is_cut else "fold",
            no_wrap=is_cut,
            width=width,
        )
    for row in rows:
        # Text, because rich would parse brackets in a cell as markup
        drawn.add_row(*map(Text, row))
    with console.capture() as captured:
        console.print(drawn)
    for line in captured.get().splitlines():
        # cells are padded to the width of their column, also the last ones
        print(line.rstrip())


COLUMN_GAP = 3
MIN_CUT_WIDTH = 16
"""The least width of a column that is cut."""


def _column_widths(rows: Sequence[Sequence[str]], width: int, *, cut: bool) -> list[int]:
    """The widths of the columns within `width`: wide ones are made narrower, no narrower than their longest word.

    With `cut` the last column is narrowed first."""
    from rich.cells import cell_len

    columns = list(zip(*rows, strict=True))
    widths = [max(1, *(cell_len(cell) for cell in column)) for column in columns]
    words = [max([1, *(cell_len(word) for cell in column for word in cell.split())]) for column in columns]
    available = width - COLUMN_GAP * (len(columns) - 1)
    if cut:
        words[-1] = min(widths[-1], MIN_CUT_WIDTH)
        widths[-1] = max(words[-1], min(widths[-1], available - sum(widths[:-1])))
    # first between words, then within them: nothing may be lost at the edge
    for least in (words, [1] * len(columns)):
        while sum(widths) > available:
            shrinkable = [index for index, size in enumerate(widths) if size > least[index]]
            if not shrinkable:
                break
            widths[max(shrinkable, key=lambda index: widths[index])] -= 1
    return widths


def print_heading(text: str) -> None:
    """Print the title of a section."""
    from rich.console import Console

    print()
    Console().print(printable(text), style="bold", highlight=False, markup=False)


def format_count(number: float) -> str:
    """A large number with three digits and a unit: 63.1 M."""
    # thousands only from ten on: 9,876 says more than 9.88 k
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= 10 * size or (abs(number) >= size > 1e3):
            return f"{number / size:.3g} {unit}"
    return f"{number:,.0f}"


def format_bytes(bytes_: float) -> str:
    """A number of bytes with three digits and a unit (powers of 1024)."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if abs(bytes_) >= 1 << power:
            return f"{bytes_ / (1 << power):.3g} {unit}"
    return f"{bytes_:.0f} B"


@contextmanager
def status_line(text: str) -> Iterator[Callable[[str], None]]:
    """Show a status line on stderr while the block runs, if stderr is a terminal; yields a function to update it."""
    # a log would keep every state of a line that is meant to be overwritten
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True).status(printable(text)) as status:
        yield lambda text: status.update(printable(text))
