"""What is counted while examples are prepared, for the summary of a data set."""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import final

import numpy as np

from manyformer.data.summary import EXAMPLES, kept_example
from manyformer.type_aliases import IntArray


@final
class ExampleFacts:
    """The lengths of the examples of each split, before any is cut, the labels of training examples, and a few of them.

    The examples shown are the first ones, or where labels are given with them, the first one of each label before."""

    def __init__(self, names: Iterable[str]) -> None:
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
        others = [example for example in self._first if example not in of_labels]
        return tuple([*of_labels, *others][:EXAMPLES])

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


def folders_of(names: Iterable[str]) -> list[str]:
    """The folders that the sources with these names are in, for `shown_place`."""
    return list(dict.fromkeys(f"{Path(name).parent}/" for name in names))


def shown_place(location: str, folders: Iterable[str]) -> str:
    """A location without the folder of its source."""
    return next((location.removeprefix(folder) for folder in folders if location.startswith(folder)), location)
