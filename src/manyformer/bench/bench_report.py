"""What a benchmark found: a record, told as tables, JSON, CSV or pictures."""

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from manyformer.bench.candidate import BenchCandidate, BenchKind
from manyformer.flops import FLOP_CONVENTION

TITLES: dict[BenchKind, str] = {
    "forward": "forward pass, ms",
    "step": "training step, ms",
    "decode": "decoding, ms per token after that many tokens",
}

OPERATIONS: dict[BenchKind, str] = {"forward": "forward pass", "step": "training step", "decode": "one token"}

MEMORY_TITLES: dict[BenchKind, str] = {
    "forward": "extra memory of a forward pass, MB",
    "step": "extra memory of a training step, MB",
    "decode": "state after that many tokens, MB",
}


@dataclass(frozen=True)
class BenchCell:
    """One candidate at one length: the median time in seconds with its quartiles; None where nothing was measured.

    `ratio` is the median over rounds of the time divided by the reference's in the same round, with its quartiles;
    `memory` is in bytes. `why` says why there is nothing, or what is to be known of it.
    """

    label: str
    kind: BenchKind
    length: int
    seconds: float | None = None
    lower_quartile: float | None = None
    upper_quartile: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    memory: int | None = None
    flops: int | None = None
    why: str | None = None


@dataclass(frozen=True)
class MachineInfo:
    """Where and how it was measured."""

    device: str
    threads: int
    torch: str
    precision: str
    batch: int
    rounds: int
    load: float | None

    @property
    def words(self) -> str:
        """All but the load, in one line."""
        threads = f"{self.threads} thread{'s' * (self.threads != 1)}"
        return f"{self.device}, {threads}, {self.precision}, torch {self.torch}, batch {self.batch}"


@dataclass(frozen=True)
class BenchReport:
    """All cells, and what must be known to read them."""

    candidates: tuple[BenchCandidate, ...]
    against: str | None
    machine: MachineInfo
    cells: tuple[BenchCell, ...]
    notes: tuple[str, ...] = ()

    def cell(self, label: str, what: BenchKind, length: int) -> BenchCell:
        """The cell of one candidate at one length."""
        return next(c for c in self.cells if (c.label, c.kind, c.length) == (label, what, length))

    def measured(self, label: str, what: BenchKind) -> list[BenchCell]:
        """The cells of one candidate that hold a time, by length."""
        found = [c for c in self.cells if (c.label, c.kind) == (label, what) and c.seconds is not None]
        return sorted(found, key=lambda c: c.length)

    def growth(self, label: str, what: BenchKind) -> float | None:
        """The exponent p of time ~ length^p, fitted to the longer half of the lengths; None below two of them."""
        cells = self.measured(label, what)
        cells = cells[-max(2, math.ceil(len(cells) / 2)) :]
        if len(cells) < 2:
            return None
        xs = [math.log(c.length) for c in cells]
        ys = [math.log(c.seconds or 0.0) for c in cells]
        mean = sum(xs) / len(xs)
        return sum((x - mean) * y for x, y in zip(xs, ys)) / sum((x - mean) ** 2 for x in xs)

    def crossover(self, label: str, what: BenchKind) -> int | None:
        """The measured length from which on it is faster than the reference at every length; None where it never is.

        Faster means in three of four rounds at least, so that equals do not win by chance.
        """
        first = None
        for cell in reversed(self.measured(label, what)):
            if cell.ratio_high is None or cell.ratio_high >= 1:
                break
            first = cell.length
        return first

    @property
    def labels(self) -> list[str]:
        return [candidate.label for candidate in self.candidates]

    @property
    def whats(self) -> list[BenchKind]:
        return list(dict.fromkeys(cell.kind for cell in self.cells))

    @property
    def lengths(self) -> list[int]:
        return sorted({cell.length for cell in self.cells})

    def lines(self) -> list[str]:
        """Tables for people."""
        lines = [f"{self.machine.words}; medians of {self.machine.rounds} interleaved rounds"]
        for what in self.whats:
            lines += ["", *self._table(what, TITLES[what], self._time)]
            lines += self._summary(what)
            if any(cell.memory is not None for cell in self.cells if cell.kind == what):
                lines += ["", *self._table(what, MEMORY_TITLES[what], _megabytes)]
        if any(cell.flops is not None for cell in self.cells):
            lines += ["", *self._flops_table()]
        notes = [*self.notes, *self._reasons()]
        return [*lines, *([""] if notes else []), *(f"note: {text}" for text in notes)]

    def to_json(self) -> str:
        """Everything, with growth and crossover worked out."""
        found = {
            label: {
                what: {"growth": self.growth(label, what), "faster_from": self.crossover(label, what)}
                for what in self.whats
            }
            for label in self.labels
        }
        text: dict[str, Any] = {
            "candidates": [candidate._asdict() for candidate in self.candidates],
            "against": self.against,
            "machine": asdict(self.machine),
            "flops_count": FLOP_CONVENTION,
            "summary": found,
            "cells": [asdict(cell) for cell in self.cells],
            "notes": list(self.notes),
        }
        return json.dumps(text, indent=2)

    def to_csv(self) -> str:
        """One row a cell; seconds, bytes and operations."""
        file = io.StringIO()
        writer = csv.DictWriter(file, fieldnames=list(asdict(self.cells[0])), lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(cell) for cell in self.cells)
        return file.getvalue()

    def save(self, path: str | Path) -> None:
        """Write a picture (.png, .svg, .pdf), a table (.csv) or everything (.json), as the ending says."""
        from manyformer.bench.draw_report import write_report

        write_report(self, Path(path))

    def _table(self, what: BenchKind, title: str, show: Any) -> Iterator[str]:
        yield title
        rows = [["length", *self.labels]]
        for length in self.lengths:
            rows.append([f"{length:,}", *(show(self.cell(label, what, length)) for label in self.labels)])
        yield from _aligned(rows)

    def _time(self, cell: BenchCell) -> str:
        if cell.seconds is None:
            return "–"
        ratio = "" if cell.ratio is None or cell.label == self.against else f" ({cell.ratio:.2f}x)"
        return f"{1e3 * cell.seconds:.2f}{ratio}"

    def _summary(self, what: BenchKind) -> Iterator[str]:
        growths = [(label, self.growth(label, what)) for label in self.labels]
        if any(p is not None for _, p in growths):
            told = ", ".join(f"{label} n^{p:.1f}" for label, p in growths if p is not None)
            yield f"growth over the longer half: {told}"
        if self.against is not None and len(self.labels) > 1:
            others = [label for label in self.labels if label != self.against and self.measured(label, what)]
            told = ", ".join(f"{label} {self._from(label, what)}" for label in others)
            if told:
                yield f"faster than {self.against} from length: {told}"

    def _from(self, label: str, what: BenchKind) -> str:
        first = self.crossover(label, what)
        if first is None:
            return f"never up to {self.measured(label, what)[-1].length:,}"
        shortest = first == self.lengths[0]
        return f"{first:,}{' (the shortest measured)' * shortest}"

    def _reasons(self) -> Iterator[str]:
        """What is to be known of single cells, those with the same reason together."""
        told: dict[str, dict[str, None]] = {}
        for cell in self.cells:
            if cell.why:
                told.setdefault(cell.why, {})[f"{cell.label} ({cell.kind})"] = None
        return (f"{', '.join(who)}: {why}" for why, who in told.items())

    def _flops_table(self) -> Iterator[str]:
        yield f"operations: {', '.join(OPERATIONS[what] for what in self.whats)}"
        rows = [["length", *self.labels]]
        for length in self.lengths:
            cells = [[self.cell(label, what, length).flops for what in self.whats] for label in self.labels]
            rows.append([f"{length:,}", *(", ".join(map(_count, row)) for row in cells)])
        yield from _aligned(rows)
        yield FLOP_CONVENTION


def _megabytes(cell: BenchCell) -> str:
    return "–" if cell.memory is None else f"{cell.memory / 1e6:.1f}"


def _count(flops: int | None) -> str:
    if flops is None:
        return "–"
    power = max(0, min(4, int(math.log10(max(flops, 1))) // 3))
    return f"{flops / 1000**power:.3g}{('', 'k', 'M', 'G', 'T')[power]}"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns flush right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(text.rjust(width) for text, width in zip(row, widths))
