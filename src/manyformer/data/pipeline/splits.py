"""Splits of data: sources for each split, or training data that is held out by a hash of its content."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Generic, NamedTuple, TypeVar

from manyformer.base.errors import UserError
from manyformer.data.pipeline.summary import Finding

PathOrPaths = str | Sequence[str]


class SampleSize(NamedTuple):
    """A limit of what is read of the sources of a split, each from its beginning."""

    records: int
    characters: int
    sources: int = 50


class DataSource(ABC):
    """A source of data that can be read repeatedly; `is_cut_short` says that the last pass ended before its end."""

    name: str
    is_cut_short: bool = False
    notes: tuple[str, ...] = ()
    """Lines for a person about how the source is read, such as a header that was found."""

    def found(self) -> Iterator[Finding]:
        """The findings of the last pass besides the data that it read."""
        return iter(())

    def limit(self, records: int, characters: int) -> None:
        """Read so much at most in every pass; without effect for sources that are read whole."""
        self.is_cut_short = False

    @abstractmethod
    def stamp(self) -> list[str | int]:
        """Values that change when the content changes, found without reading all of it."""


SourceT = TypeVar("SourceT", bound=DataSource)


class Splits(NamedTuple, Generic[SourceT]):
    """The sources of each split; for a split without sources, the fraction in `shares` of training data is held out."""

    sources: dict[str, list[SourceT]]
    shares: dict[str, float]

    @classmethod
    def open(
        cls,
        open_sources: Callable[[PathOrPaths, str], list[SourceT]],
        path: PathOrPaths,
        valid: PathOrPaths | float,
        test: PathOrPaths | None,
    ) -> "Splits[SourceT]":
        """Open the sources of each split; a number as `valid` holds out that fraction of the training data."""
        paths = {"train": path, "valid": valid, "test": test}
        shares = {"valid": valid} if isinstance(valid, float) else {}
        # training first, since the order of this dictionary is that in which splits are read and shown
        sources = {
            split: open_sources(value, split)
            for split, value in paths.items()
            if value is not None and not isinstance(value, float)
        }
        return cls(sources, shares)

    @property
    def names(self) -> list[str]:
        """The names of all splits, training first."""
        return list(dict.fromkeys(["train", *self.shares, *self.sources]))

    def source_names(self, split: str = "train") -> str:
        """The names of the sources of a split, or of the training data that it is held out from."""
        return ", ".join(source.name for source in self.sources.get(split, self.sources["train"]))

    def limit(self, size: SampleSize) -> None:
        """Read a part of the sources of each split at most."""
        for split, sources in self.sources.items():
            limited = sources[: size.sources]
            for source in limited:
                # the budget is shared, so that a look at a thousand files takes no longer than at one
                source.limit(max(1, size.records // len(limited)), max(1, size.characters // len(limited)))
                source.is_cut_short = len(limited) < len(sources)
            self.sources[split] = limited

    @property
    def are_cut_short(self) -> bool:
        """Whether something of a source was not read because of a limit."""
        return any(source.is_cut_short for source in self._all_sources())

    def _all_sources(self) -> Iterator[SourceT]:
        return chain.from_iterable(self.sources.values())

    def notes(self) -> list[str]:
        """Lines for a person about how all sources are read."""
        return list(dict.fromkeys(note for source in self._all_sources() for note in source.notes))

    def found(self) -> list[Finding]:
        """The findings of the last pass over each source, each once where several splits read parts of one file."""
        return list(dict.fromkeys(finding for source in self._all_sources() for finding in source.found()))

    def stamps(self) -> dict[str, list[list[str | int]]]:
        """The stamps of all sources, which change when any content changes."""
        return {name: [source.stamp() for source in sources] for name, sources in self.sources.items()}

    def assign(self, content: bytes) -> str:
        """The split of training data with this content: equal contents are never in two splits."""
        # by content alone: neither the order of the data nor other rows change the split of a row
        fraction = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") / 2**64
        for name, share in self.shares.items():
            if fraction < share:
                return name
            # shares are ranges of [0, 1) one after another, and training has the rest
            fraction -= share
        return "train"

    def check_counts(self, counts: Mapping[str, int], noun: str) -> None:
        """Raise UserError if a split has none of the items called `noun`."""
        for name in [name for name, count in counts.items() if not count]:
            if name in self.shares:
                share = self.shares[name]
                remedy = f"too few {noun} to hold out {share} of them; give data.{name}=FILE"
                raise UserError(f"{self.source_names(name)}: {remedy}")
            key = "path" if name == "train" else name
            raise UserError(f"{self.source_names(name)}: there are no {noun} in it (data.{key})")


def path_list(paths: PathOrPaths) -> Sequence[str]:
    """One or several paths as a sequence."""
    if isinstance(paths, str):
        return [paths]
    return paths
