"""Splits of tables: by path, or by a hash of the text, so that equal sources are never in two splits."""

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


def tables_by_path(open_one: Callable[[str], RowTable]) -> Callable[[PathOrPaths], list[RowTable]]:
    """A reader that opens one table for each path."""
    return lambda paths: [open_one(path) for path in ([paths] if isinstance(paths, str) else paths)]


class TableSplits(NamedTuple):
    """The tables of each split; for a split without tables, the fraction in `shares` of training rows is held out."""

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
        """Open the tables of each path; a number as `valid` holds out that fraction of the training rows."""
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
        """The names of all splits, training first."""
        return list(dict.fromkeys(["train", *self.shares, *self.tables]))

    def stamps(self) -> dict[str, list[list[str | int]]]:
        """The stamps of all tables, which change when any content changes."""
        return {name: [table.stamp() for table in tables] for name, tables in self.tables.items()}

    def rows(self) -> Iterator[tuple[str, TableRow]]:
        """Stream each row with its split; rows with an empty cell are skipped, except in splits read from a path."""
        for table in self.tables["train"]:
            yield from ((self._assign_split(row.cells[0]), row) for row in table.rows() if all(row.cells))
        for name, tables in self.tables.items():
            if name != "train":
                yield from ((name, row) for table in tables for row in table.rows())

    def training_rows(self) -> Iterator[TableRow]:
        """Stream the rows of the training split, from which tokenizers are trained."""
        for table in self.tables["train"]:
            yield from (row for row in table.rows() if all(row.cells) and self._assign_split(row.cells[0]) == "train")

    def _assign_split(self, text: str) -> str:
        if not self.shares:
            return "train"
        fraction = hash_fraction(text)
        for name, share in self.shares.items():
            if fraction < share:
                return name
            fraction -= share
        return "train"


class SplitRecorder:
    """Records the rows that pass through it: counts and a hash per split, and a JSONL file of each held-out split."""

    def __init__(self, splits: TableSplits, cache: Path, stack: ExitStack) -> None:
        self._splits = splits
        self.counts = dict.fromkeys(splits.names, 0)
        self._hashes = {name: hashlib.sha256() for name in splits.names}
        held_out = [name for name in splits.names if name != "train"]
        self._files: dict[str, BinaryIO] = {
            n: stack.enter_context(atomic_write(cache / f"{n}.jsonl")) for n in held_out
        }

    def blocks(self, size: int) -> Iterator[tuple[str, list[TableRow]]]:
        """Stream the rows in blocks of `size` rows of one split, recording each row."""
        pending: dict[str, list[TableRow]] = {name: [] for name in self._splits.names}
        for name, row in self._splits.rows():
            self._record_row(name, row)
            pending[name].append(row)
            if len(pending[name]) == size:
                yield name, pending[name]
                pending[name] = []
        yield from pending.items()

    def hashes(self) -> dict[str, str]:
        """A hash of the rows of each split. Raises UserError if a split is empty."""
        for name, count in self.counts.items():
            if not count:
                tables = ", ".join(table.name for table in self._splits.tables.get(name, self._splits.tables["train"]))
                share = self._splits.shares.get(name)
                if share is None:
                    raise UserError(f"{tables}: there are no rows in it (data.{'path' if name == 'train' else name})")
                raise UserError(f"{tables}: too few rows to hold out {share} of them; give data.{name}=FILE")
        return {name: hasher.hexdigest() for name, hasher in self._hashes.items()}

    def _record_row(self, name: str, row: TableRow) -> None:
        self.counts[name] += 1
        line = json.dumps([*row.cells, row.location], ensure_ascii=False).encode() + b"\n"
        self._hashes[name].update(line)
        if name in self._files:
            self._files[name].write(line)
