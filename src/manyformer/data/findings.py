"""What a reader finds in a file besides good rows: how many records of a kind there are, and where the first one is."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple


class Finding(NamedTuple):
    """So many of something, such as "rows with an empty cell", and the location of the first, "" where unknown."""

    number: int
    what: str
    first: str

    def __str__(self) -> str:
        place = f" (first: {self.first})" if self.first else ""
        return f"{self.number:,} {self.what}{place}"


@dataclass
class Tally:
    """Counts things of one kind and remembers where the first was."""

    count: int = 0
    first: str = ""

    def add(self, location: str) -> None:
        """Count one more."""
        if not self.count:
            self.first = location
        self.count += 1


@dataclass
class TableFindings:
    """What one pass over a table finds: records without cells, and those with another number of cells than the first.

    A record that lacks a needed cell is refused, so that `uneven` ones are read, by the cells that are needed."""

    blank: Tally = field(default_factory=Tally)
    uneven: Tally = field(default_factory=Tally)

    def found(self) -> Iterator[Finding]:
        """What there is to tell."""
        if self.blank.count:
            yield Finding(self.blank.count, plural(self.blank.count, "blank line") + " left out", self.blank.first)
        if self.uneven.count:
            noun = plural(self.uneven.count, "row")
            verb = "has" if self.uneven.count == 1 else "have"
            yield Finding(
                self.uneven.count, f"{noun} read that {verb} more or fewer cells than the first", self.uneven.first
            )


def plural(count: int, noun: str) -> str:
    """The noun for so many of it."""
    return noun if count == 1 else f"{noun}s"
