"""Counts of what a reader changes or leaves out in files of other people, with the first place of each change."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import final

from manyformer.data.findings import Finding, plural


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
