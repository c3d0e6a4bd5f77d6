"""Counts of what a reader changes or leaves out in files of other people, with the first place of each change."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import final


@final
class ChangeCounts:
    """How many items had each change, and the location of the first one."""

    def __init__(self) -> None:
        self._numbers = Counter[str]()
        self._first: dict[str, str] = {}

    def add(self, change: str, location: str) -> None:
        """Count a change of the item at this location."""
        self._numbers[change] += 1
        self._first.setdefault(change, location)

    def __getitem__(self, change: str) -> int:
        return self._numbers[change]

    @property
    def numbers(self) -> dict[str, int]:
        """The number of items with each change that occurred."""
        return dict(self._numbers)

    @property
    def first(self) -> dict[str, str]:
        """The location of the first item with each change that occurred."""
        return dict(self._first)


def describe_count(text: str, number: int, noun: str, first: str | None) -> str:
    """A line for a person: `text` is the change, `first` where it occurred first, None where that is unknown."""
    place = "" if first is None else f", the first {first}"
    return f"{text}: {number:,} {noun}{place}"


def describe_counts(
    numbers: Mapping[str, int], first: Mapping[str, str], noun: str, texts: Mapping[str, str]
) -> Iterator[str]:
    """A line for each change that occurred, in the order of `texts`, which has the words for each."""
    for change, text in texts.items():
        if numbers.get(change):
            yield describe_count(text, numbers[change], noun, first.get(change))
