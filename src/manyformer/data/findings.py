"""What a reader finds in a file besides good rows: how many records of a kind there are, and where the first one is."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, final


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


@final
class ChangeCounts:
    """How many items of a file a reader changed or left out in each way, and the location of the first one."""

    def __init__(self) -> None:
        self._numbers = Counter[str]()
        self._first: dict[str, str] = {}

    def add(self, change: str, location: str) -> None:
        """Count a change of the item at this location."""
        self._numbers[change] += 1
        self._first.setdefault(change, location)

    def findings(self, noun: str, texts: Mapping[str, str]) -> Iterator[Finding]:
        """What there is to tell, in the order of `texts`, which has the words for each change of a `noun`."""
        return change_findings(self._numbers, self._first, noun, texts)


def change_findings(
    numbers: Mapping[str, int], first: Mapping[str, str], noun: str, texts: Mapping[str, str]
) -> Iterator[Finding]:
    """A finding for each change that occurred; the `first` location is unknown in files of earlier versions."""
    for change, text in texts.items():
        if number := numbers.get(change, 0):
            yield Finding(number, f"{plural(number, noun)} {text}", first.get(change, ""))


def plural(count: int, noun: str) -> str:
    """The noun for so many of it."""
    if count == 1:
        return noun
    return f"{noun}s"
