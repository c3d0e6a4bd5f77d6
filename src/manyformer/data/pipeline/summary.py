"""What a person can check of a data set at a glance: rows, labels, lengths, what was left out, and three examples.

Readers count what they find in a file besides good rows, and pipelines what they prepare; a summary is made of both."""

import textwrap
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, final

import numpy as np
from pydantic import PlainSerializer

from manyformer.base.type_aliases import IntArray

EXAMPLES = 3
"""The number of training examples in a summary."""
LARGE_SHARE = 0.05
"""A larger share of examples that are cut or left out is a warning."""
WIDTH = 71
"""The width of a line: 80 columns less the word before it."""
_LABELS_SHOWN = 8
_EXAMPLE_CHARACTERS = 400
"""The most characters of a cell that are kept; fewer are shown."""


class Finding(NamedTuple):
    """A number of things, such as "rows with an empty cell", and the location of the first, "" where unknown."""

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
        # the first alone: a million bad rows are one line with one place to look at
        if not self.count:
            self.first = location
        self.count += 1


@dataclass
class TableFindings:
    """The findings of a pass over a table: records without cells, and those of another number of cells than the first.

    A record that lacks a needed cell is refused, so that `uneven` ones are read, by the cells that are needed."""

    blank: Tally = field(default_factory=Tally)
    uneven: Tally = field(default_factory=Tally)

    def found(self) -> Iterator[Finding]:
        """The findings of the pass."""
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
    """The numbers of items of a file that a reader changed or left out in each way, and the location of the first."""

    def __init__(self) -> None:
        self._numbers = Counter[str]()
        self._first: dict[str, str] = {}

    def add(self, change: str, location: str) -> None:
        """Count a change of the item at this location."""
        self._numbers[change] += 1
        self._first.setdefault(change, location)

    def findings(self, noun: str, texts: Mapping[str, str]) -> Iterator[Finding]:
        """The findings in the order of `texts`, which has the words for each change of a `noun`."""
        return change_findings(self._numbers, self._first, noun, texts)


def change_findings(
    numbers: Mapping[str, int], first: Mapping[str, str], noun: str, texts: Mapping[str, str]
) -> Iterator[Finding]:
    """A finding for each change that occurred; the `first` location is unknown in files of earlier versions."""
    for change, text in texts.items():
        if number := numbers.get(change, 0):
            yield Finding(number, f"{plural(number, noun)} {text}", first.get(change, ""))


class LengthSummary(NamedTuple):
    """The lengths of examples before any is cut: `beyond` of `examples` are longer than `limit`, a setting's value.

    `fate` is what happens to those: "cut" or "left out"; `limit` is None where nothing does. `title` is what the
    lengths are called."""

    unit: str
    median: int | float
    largest: int | float
    examples: int
    beyond: int = 0
    limit: int | float | None = None
    setting: str = ""
    fate: str = "cut"
    title: str = "lengths"

    @classmethod
    def of(
        cls,
        lengths: IntArray,
        unit: str,
        *,
        per_unit: int = 1,
        limit: float | None = None,
        setting: str = "",
        fate: str = "cut",
        title: str = "lengths",
    ) -> "LengthSummary":
        """The summary of some lengths, of which `per_unit` make one unit, such as the samples of a second."""
        beyond = 0
        if limit is not None:
            beyond = int((lengths > limit * per_unit).sum())
        # plain numbers, since summaries are saved as JSON
        median: int | float = int(np.median(lengths)) if len(lengths) else 0
        largest: int | float = int(lengths.max()) if len(lengths) else 0
        if per_unit > 1:
            median = round(median / per_unit, 3)
            largest = round(largest / per_unit, 3)
        return cls(unit, median, largest, len(lengths), beyond, limit, setting, fate, title)

    @property
    def share(self) -> float:
        """The share of examples that are longer than the limit."""
        return self.beyond / max(1, self.examples)


# pydantic would save a named tuple as a list, whose meaning depends on the order of its fields
_AS_OBJECT = PlainSerializer(lambda record: record._asdict())


class DataSummary(NamedTuple):
    """The facts of a data set: how many examples each split has, the labels of training examples, and so on.

    `noun` is one example. `is_part` says that only the beginning of the files was read."""

    noun: str
    counts: dict[str, int]
    labels: dict[str, int] | None = None
    lengths: Annotated[LengthSummary, _AS_OBJECT] | None = None
    left_out: tuple[Annotated[Finding, _AS_OBJECT], ...] = ()
    examples: tuple[tuple[str, ...], ...] = ()
    is_part: bool = False
    other_lengths: tuple[Annotated[LengthSummary, _AS_OBJECT], ...] = ()
    """The lengths of the parts, where examples have several with a length."""

    @property
    def all_lengths(self) -> tuple[LengthSummary, ...]:
        """The lengths of everything that has one."""
        if self.lengths is None:
            measured = self.other_lengths
        else:
            measured = (self.lengths, *self.other_lengths)
        return tuple(lengths for lengths in measured if lengths.examples)

    def facts(self) -> Iterator[str]:
        """Lines about labels, lengths and what was left out."""
        if self.is_part:
            counts = "; ".join(f"{name}: {_amount(count, self.noun)}" for name, count in self.counts.items())
            yield f"in the beginning of the files, {counts}"
        if self.labels is not None:
            yield f"labels: {_label_counts(self.labels)}"
        for lengths in self.all_lengths:
            median = _number(lengths.median)
            largest = _number(lengths.largest)
            yield f"{lengths.title}: median {median}, largest {largest} {lengths.unit}"
            if lengths.beyond and lengths.limit is not None:
                examples = _amount(lengths.examples, self.noun)
                limit = f"{_number(lengths.limit)} {lengths.unit} ({lengths.setting})"
                yield f"{lengths.beyond:,} of {examples} {lengths.fate} at {limit}"
        yield from map(str, self.left_out)

    def example_lines(self) -> Iterator[str]:
        """A line for each of a few training examples, shortened; control characters are escaped."""
        for cells in self.examples:
            yield "e.g. " + " | ".join(_fitted(cells, WIDTH - 5 - 3 * (len(cells) - 1)))

    def warnings(self) -> Iterator[str]:
        """Lines about what is likely to be a mistake."""
        for lengths in self.all_lengths:
            if lengths.limit is None or lengths.share <= LARGE_SHARE:
                continue
            examples = _amount(lengths.examples, self.noun)
            verb = "is" if lengths.beyond == 1 else "are"
            yield (
                f"{lengths.beyond:,} of {examples} ({lengths.share:.1%}) {verb} {lengths.fate} at "
                f"{_number(lengths.limit)} {lengths.unit}: the median is {_number(lengths.median)}, the largest "
                f"{_number(lengths.largest)}; {lengths.setting} sets the limit"
            )

    def as_json(self) -> dict[str, Any]:
        """The facts as plain values."""
        lengths = None
        if self.lengths is not None:
            lengths = self.lengths._asdict()
        return {
            **self._asdict(),
            "lengths": lengths,
            "left_out": [finding._asdict() for finding in self.left_out],
            "other_lengths": [lengths._asdict() for lengths in self.other_lengths],
        }


@final
class ExampleFacts:
    """The lengths of the examples of each split, before any is cut, the labels of training examples, and a few of them.

    The examples shown are the first ones, or where labels are given with them, the first one of each label before."""

    def __init__(self, names: Iterable[str]) -> None:
        # arrays of 8 bytes a number, where lists of a large corpus would take several times as much
        self.lengths: dict[str, array[int]] = {name: array("q") for name in names}
        self.labels: Counter[str] = Counter()
        self._first: list[tuple[str, ...]] = []
        self._first_of_label: dict[str, tuple[str, ...]] = {}

    @property
    def counts(self) -> dict[str, int]:
        """The number of examples by split."""
        return {name: len(lengths) for name, lengths in self.lengths.items()}

    @property
    def examples(self) -> tuple[tuple[str, ...], ...]:
        """The examples that are shown."""
        of_labels = list(self._first_of_label.values())
        unlabelled = [example for example in self._first if example not in of_labels]
        return tuple([*of_labels, *unlabelled][:EXAMPLES])

    def lengths_of(self, names: Iterable[str]) -> IntArray:
        """The lengths of the examples of these splits."""
        return np.array([length for name in names for length in self.lengths[name]], dtype=np.int64)

    def add(self, split: str, length: int, cells: Sequence[str], label: str | None = None) -> None:
        """Count an example, which is shown as `cells`."""
        self.lengths[split].append(length)
        if split == "train":
            self.show(cells, label)
            if label is not None:
                self.labels[label] += 1

    def show(self, cells: Sequence[str], label: str | None = None) -> None:
        """Keep a training example if it is one of those that are shown."""
        if len(self._first) < EXAMPLES:
            self._first.append(kept_example(cells))
        if label is not None and len(self._first_of_label) < EXAMPLES:
            self._first_of_label.setdefault(label, kept_example(cells))


def kept_example(cells: Sequence[str]) -> tuple[str, ...]:
    """An example as a summary keeps it."""
    return tuple(cell[:_EXAMPLE_CHARACTERS] for cell in cells)


def folders_of(names: Iterable[str]) -> list[str]:
    """The folders that the sources with these names are in, for `shown_place`."""
    return list(dict.fromkeys(f"{Path(name).parent}/" for name in names))


def shown_place(location: str, folders: Iterable[str]) -> str:
    """A location without the folder of its source."""
    return next((location.removeprefix(folder) for folder in folders if location.startswith(folder)), location)


def wrapped(text: str) -> list[str]:
    """A text in lines of a summary, with long words, such as paths, in one piece."""
    # a path that is divided could not be copied
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def plural(count: int, noun: str) -> str:
    """The noun for so many of it."""
    if count == 1:
        return noun
    return f"{noun}s"


def _number(value: float) -> str:
    """A whole number, or one with so many digits as it has, up to six."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,g}"


def _amount(count: int, noun: str) -> str:
    return f"{count:,} {plural(count, noun)}"


def _label_counts(labels: Mapping[str, int]) -> str:
    ranked = Counter(labels).most_common()
    if len(ranked) <= _LABELS_SHOWN:
        shown = ranked
    else:
        shown = ranked[: _LABELS_SHOWN - 2]
    text = ", ".join(f"{_shortened(label, 30)} {count:,}" for label, count in shown)
    rest = ranked[len(shown) :]
    if rest:
        return f"{text}, and {len(rest):,} others, the rarest with {rest[-1][1]:,}"
    return text


def _shortened(text: str, room: int) -> str:
    """The beginning of a text in `room` characters, with escapes for what does not print and for line ends."""
    # a cell may hold control sequences of a terminal
    escaped = "".join(character if character.isprintable() else _escape(character) for character in text[: room + 1])
    if len(escaped) <= room and len(text) <= room:
        return escaped
    return f"{escaped[: room - 3]}..."


def _fitted(cells: Sequence[str], room: int) -> list[str]:
    """The cells in so many characters together: short ones are whole, the others share what is left."""
    fitted: dict[int, str] = {}
    # from the shortest to the longest, so that what short cells leave over goes to the others
    order = sorted(range(len(cells)), key=lambda number: len(cells[number]))
    for place, number in enumerate(order):
        # at least 8 characters, even where many cells make the line longer than the screen
        fitted[number] = _shortened(cells[number], max(8, room // (len(order) - place)))
        room -= len(fitted[number])
    return [fitted[number] for number in range(len(cells))]


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
