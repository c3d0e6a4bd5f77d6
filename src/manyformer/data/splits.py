"""Tables divided into splits: by path, or by the text itself, so that no source ever stands in two splits."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, NamedTuple

from manyformer.data.atomic_files import atomic_write
from manyformer.data.pair_tables import RowTable, hash_fraction
from manyformer.data.table_files import TableRow
from manyformer.errors import UserError

PathOrPaths = str | Sequence[str]


class TableSplits(NamedTuple):
    """The tables of each split; without any for a split, `shares` of the training rows are held out for it."""

    tables: dict[str, list[RowTable]]
    shares: dict[str, float]

    @classmethod
    def read(
        cls,
        read: Callable[[PathOrPaths], list[RowTable]],
        path: PathOrPaths,
        valid: PathOrPaths | float,
        test: PathOrPaths | None,
    ) -> "TableSplits":
        """A table for each path, and a share of the training rows where `valid` is one."""
        tables = {"train": read(path)}
        shares: dict[str, float] = {}
        if isinstance(valid, float):
            shares["valid"] = valid
        else:
            tables["valid"] = read(valid)
        if test is not None:
            tables["test"] = read(test)
        return cls(tables, shares)

    @property
    def names(self) -> list[str]:
        """All splits, training first."""
        return list(dict.fromkeys(["train", *self.shares, *self.tables]))

    def stamps(self) -> dict[str, list[list[str | int]]]:
        """What changes when any content does."""
        return {name: [table.stamp() for table in tables] for name, tables in self.tables.items()}

    def rows(self) -> Iterator[tuple[str, TableRow]]:
        """Each row with its split; rows with an empty cell are left out but in splits that have a path of their own."""
        for table in self.tables["train"]:
            yield from ((self._lot(row.cells[0]), row) for row in table.rows() if all(row.cells))
        for name, tables in self.tables.items():
            if name != "train":
                yield from ((name, row) for table in tables for row in table.rows())

    def training(self) -> Iterator[TableRow]:
        """The rows that tokenizers may learn from."""
        for table in self.tables["train"]:
            yield from (row for row in table.rows() if all(row.cells) and self._lot(row.cells[0]) == "train")

    def _lot(self, text: str) -> str:
        if not self.shares:
            return "train"
        rest = hash_fraction(text)
        for name, share in self.shares.items():
            if rest < share:
                return name
            rest -= share
        return "train"


class SplitRecorder:
    """What went by while shards were written: rows of each split, a hash of its text, and held-out rows as a file."""

    def __init__(self, splits: TableSplits, cache: Path, stack: ExitStack) -> None:
        self._splits = splits
        self.counts = dict.fromkeys(splits.names, 0)
        self._hashes = {name: hashlib.sha256() for name in splits.names}
        held = [name for name in splits.names if name != "train"]
        self._files: dict[str, BinaryIO] = {n: stack.enter_context(atomic_write(cache / f"{n}.jsonl")) for n in held}

    def blocks(self, size: int) -> Iterator[tuple[str, list[TableRow]]]:
        """The rows, so many of one split together, each noted down."""
        waiting: dict[str, list[TableRow]] = {name: [] for name in self._splits.names}
        for name, row in self._splits.rows():
            self._note(name, row)
            waiting[name].append(row)
            if len(waiting[name]) == size:
                yield name, waiting[name]
                waiting[name] = []
        yield from waiting.items()

    def hashes(self) -> dict[str, str]:
        """A hash of each split's text; UserError where a split has come out empty."""
        for name, count in self.counts.items():
            if not count:
                tables = ", ".join(table.name for table in self._splits.tables.get(name, self._splits.tables["train"]))
                share = self._splits.shares.get(name)
                if share is None:
                    raise UserError(f"{tables}: there is nothing in it (data.{'path' if name == 'train' else name})")
                raise UserError(f"{tables}: too little to hold out {share} of it; give data.{name}=FILE")
        return {name: total.hexdigest() for name, total in self._hashes.items()}

    def _note(self, name: str, row: TableRow) -> None:
        self.counts[name] += 1
        line = json.dumps([*row.cells, row.where], ensure_ascii=False).encode() + b"\n"
        self._hashes[name].update(line)
        if name in self._files:
            self._files[name].write(line)
