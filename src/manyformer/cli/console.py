"""What the commands share to speak: results to stdout, all else to stderr, tables that scripts can cut."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

UNCUT = 10_000
"""The width of a table where no terminal limits it."""


def print_result(text: str = "") -> None:
    """A line of the result, on stdout."""
    print(text)


def print_note(text: str) -> None:
    """A line about the work, on stderr, out of the way of what a script reads."""
    print(text, file=sys.stderr)


def print_error(text: str, *, mark: str = "error: ") -> None:
    """A mistake, each of its lines marked, on stderr."""
    for line in text.splitlines() or [""]:
        print(f"{mark}{line}", file=sys.stderr)


def print_json(value: Any) -> None:
    """One JSON document on stdout; numbers that JSON has not (inf, nan) become null."""
    print(json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    return value if isinstance(value, str | int | None) else str(value)


def print_table(headers: Sequence[str], rows: Iterable[Sequence[Any]], *, right: Iterable[int] = ()) -> None:
    """A table: fitted to a terminal, or one uncut line a row where a script or a file reads it.

    The columns `right` (counted from 0) are flush right.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    numbers = set(right)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, show_header=any(headers))
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index in numbers else "left", overflow="fold")
    for row in rows:
        # Text, because a cell may hold brackets, which rich would read as its markup
        table.add_row(*(Text(str(cell)) for cell in row))
    console = Console(width=None if sys.stdout.isatty() else UNCUT)
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        print(line.rstrip())


def print_heading(text: str) -> None:
    """The title of a section of a longer answer."""
    from rich.console import Console

    print()
    Console().print(text, style="bold", highlight=False, markup=False)


def format_count(number: float) -> str:
    """A large number for people: 63.1 M."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= 10 * size or (abs(number) >= size > 1e3):
            return f"{number / size:.3g} {unit}"
    return f"{number:,.0f}"


def format_bytes(bytes_: float) -> str:
    """A number of bytes for people, in powers of 1024."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if abs(bytes_) >= 1 << power:
            return f"{bytes_ / (1 << power):.3g} {unit}"
    return f"{bytes_:.0f} B"


@contextmanager
def status_line(text: str) -> Iterator[Callable[[str], None]]:
    """A line on stderr that says what goes on while the block runs, where a person watches; its text can be changed."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True).status(text) as status:
        yield status.update
