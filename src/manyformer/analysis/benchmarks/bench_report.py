"""The record of a benchmark, with output as tables, JSON, CSV or pictures."""

import csv
import io
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from manyformer.base.errors import UserError
from manyformer.base.files.atomic_files import atomic_write_text
from manyformer.base.files.figures import FORMATS, add_legend, curve_style, panels, write_picture
from manyformer.base.files.json_text import json_text
from manyformer.base.files.text_tables import aligned_table
from manyformer.nn.runtime.costs import FLOP_CONVENTION

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BenchKind = Literal["forward", "step", "decode"]
BENCH_KINDS: tuple[BenchKind, ...] = get_args(BenchKind)

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


FAILED = "fails: "
"""What the reason of a cell begins with whose candidate cannot be built or run."""


class BenchCandidate(NamedTuple):
    """A recipe with its own keywords, and its label in tables and pictures."""

    label: str
    recipe: str
    keywords: dict[str, Any] = {}  # noqa: RUF012


@dataclass(frozen=True)
class BenchCell:
    """One candidate at one length: the median time in seconds with its quartiles; None where nothing was measured.

    `ratio` is the median over rounds of the time divided by the reference's in the same round, with its quartiles;
    `memory` is in bytes. `reason` says why nothing was measured, or is a warning about the measurement.
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
    reason: str | None = None


@dataclass(frozen=True)
class MachineInfo:
    """The machine and the settings of a measurement."""

    device: str
    threads: int
    torch: str
    precision: str
    batch: int
    rounds: int
    load: float | None

    @property
    def description(self) -> str:
        """Everything except the load, in one line."""
        threads = f"{self.threads} thread{'s' * (self.threads != 1)}"
        return f"{self.device}, {threads}, {self.precision}, torch {self.torch}, batch {self.batch}"


@dataclass(frozen=True)
class BenchReport:
    """All cells of a benchmark, with candidates, reference, machine and notes."""

    candidates: tuple[BenchCandidate, ...]
    against: str | None
    machine: MachineInfo
    cells: tuple[BenchCell, ...]
    notes: tuple[str, ...] = ()

    def cell(self, label: str, kind: BenchKind, length: int) -> BenchCell:
        """The cell of one candidate at one length."""
        return next(c for c in self.cells if (c.label, c.kind, c.length) == (label, kind, length))

    def measured(self, label: str, kind: BenchKind) -> list[BenchCell]:
        """The cells of one candidate that hold a time, by length."""
        cells = [c for c in self.cells if (c.label, c.kind) == (label, kind) and c.seconds is not None]
        return sorted(cells, key=lambda c: c.length)

    def growth(self, label: str, kind: BenchKind) -> float | None:
        """The exponent p of time ~ length^p, fitted to the longer half of the lengths; None below two of them."""
        cells = self.measured(label, kind)
        # short lengths measure the fixed costs of a call, not its growth
        cells = cells[-max(2, math.ceil(len(cells) / 2)) :]
        if len(cells) < 2:
            return None
        return statistics.linear_regression(
            [math.log(c.length) for c in cells], [math.log(c.seconds or 0.0) for c in cells]
        ).slope

    def crossover(self, label: str, kind: BenchKind) -> int | None:
        """The shortest measured length from which on it is always faster than the reference; None if there is none.

        Faster means that the upper quartile of the ratio is below 1, so that equally fast ones do not win by chance.
        """
        crossover_length = None
        # from the longest on, because a single slow length in between breaks "always"
        for cell in reversed(self.measured(label, kind)):
            if cell.ratio_high is None or cell.ratio_high >= 1:
                break
            crossover_length = cell.length
        return crossover_length

    @property
    def failed(self) -> list[str]:
        """The candidates that could not be built or run, whose cells say why."""
        return list(dict.fromkeys(cell.label for cell in self.cells if (cell.reason or "").startswith(FAILED)))

    @property
    def labels(self) -> list[str]:
        return [candidate.label for candidate in self.candidates]

    @property
    def kinds(self) -> list[BenchKind]:
        return list(dict.fromkeys(cell.kind for cell in self.cells))

    @property
    def lengths(self) -> list[int]:
        return sorted({cell.length for cell in self.cells})

    def lines(self) -> list[str]:
        """The report as text tables."""
        lines = [f"{self.machine.description}; medians of {self.machine.rounds} interleaved rounds"]
        for kind in self.kinds:
            lines += ["", TITLES[kind], *self._table([kind], self._time), *self._summary(kind)]
            if any(cell.memory is not None for cell in self.cells if cell.kind == kind):
                lines += ["", MEMORY_TITLES[kind], *self._table([kind], _megabytes)]
        if any(cell.flops is not None for cell in self.cells):
            title = f"operations: {', '.join(OPERATIONS[kind] for kind in self.kinds)}"
            lines += ["", title, *self._table(self.kinds, _format_flops), FLOP_CONVENTION]
        notes = [*self.notes, *self._reasons()]
        return [*lines, *([""] if notes else []), *(f"note: {text}" for text in notes)]

    def to_json(self) -> str:
        """The whole record as JSON, with growth and crossover."""
        summary: dict[str, Any] = {label: {} for label in self.labels}
        for label, kind in itertools.product(self.labels, self.kinds):
            summary[label][kind] = {"growth": self.growth(label, kind), "faster_from": self.crossover(label, kind)}
        record: dict[str, Any] = {
            "candidates": [candidate._asdict() for candidate in self.candidates],
            "against": self.against,
            "machine": asdict(self.machine),
            "flops_count": FLOP_CONVENTION,
            "summary": summary,
            "cells": [asdict(cell) for cell in self.cells],
            "notes": list(self.notes),
        }
        return json_text(record, indent=2, ensure_ascii=True)

    def to_csv(self) -> str:
        """One CSV row per cell; seconds, bytes and operations."""
        file = io.StringIO()
        writer = csv.DictWriter(file, fieldnames=list(asdict(self.cells[0])), lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(cell) for cell in self.cells)
        return file.getvalue()

    def _table(self, kinds: Sequence[BenchKind], show: Callable[[BenchCell], str]) -> Iterator[str]:
        """Right-aligned columns: the lengths, and for each candidate the text of its cells of these kinds."""
        rows = [["length", *self.labels]]
        for length in self.lengths:
            cells = [[show(self.cell(label, kind, length)) for kind in kinds] for label in self.labels]
            rows.append([f"{length:,}", *map(", ".join, cells)])
        return aligned_table(rows, right=True)

    def _time(self, cell: BenchCell) -> str:
        if cell.seconds is None:
            return "–"
        if cell.ratio is None or cell.label == self.against:
            ratio = ""
        else:
            ratio = f" ({cell.ratio:.2f}x)"
        return f"{1e3 * cell.seconds:.2f}{ratio}"

    def _summary(self, kind: BenchKind) -> Iterator[str]:
        growths = [(label, self.growth(label, kind)) for label in self.labels]
        if listing := ", ".join(f"{label} n^{p:.1f}" for label, p in growths if p is not None):
            yield f"growth over the longer half: {listing}"
        if self.against is not None and len(self.labels) > 1:
            labels = [label for label in self.labels if label != self.against and self.measured(label, kind)]
            if listing := ", ".join(f"{label} {self._format_crossover(label, kind)}" for label in labels):
                yield f"faster than {self.against} from length: {listing}"

    def _format_crossover(self, label: str, kind: BenchKind) -> str:
        crossover_length = self.crossover(label, kind)
        if crossover_length is None:
            return f"never up to {self.measured(label, kind)[-1].length:,}"
        shortest = crossover_length == self.lengths[0]
        return f"{crossover_length:,}{' (the shortest measured)' * shortest}"

    def _reasons(self) -> Iterator[str]:
        """The reasons of cells, each with the labels it applies to."""
        # a dict in place of a set, which keeps the order of the cells
        labels_by_reason: dict[str, dict[str, None]] = {}
        for cell in self.cells:
            if cell.reason:
                labels_by_reason.setdefault(cell.reason, {})[f"{cell.label} ({cell.kind})"] = None
        return (f"{', '.join(labels)}: {reason}" for reason, labels in labels_by_reason.items())


def _megabytes(cell: BenchCell) -> str:
    if cell.memory is None:
        return "–"
    return f"{cell.memory / 1e6:.1f}"


def _format_flops(cell: BenchCell) -> str:
    if cell.flops is None:
        return "–"
    power = max(0, min(4, int(math.log10(max(cell.flops, 1))) // 3))
    return f"{cell.flops / 1000**power:.3g}{('', 'k', 'M', 'G', 'T')[power]}"


def write_report(report: BenchReport, path: Path) -> None:
    """Write the report in the format of the suffix of `path`. Raises UserError."""
    if path.suffix.lower() not in (*FORMATS, ".csv", ".json"):
        raise UserError(f"{path} must end in .csv, .json or one of {', '.join(FORMATS)}: the ending decides the format")
    match path.suffix.lower():
        case ".csv":
            atomic_write_text(path, report.to_csv())
        case ".json":
            atomic_write_text(path, report.to_json() + "\n")
        case _:
            _draw(report, path)


def _draw(report: BenchReport, path: Path) -> None:
    """Time (top) and memory (bottom) against length on logarithmic axes, where a power law is a straight line."""
    kinds = report.kinds
    figure, axes = panels(2, len(kinds))
    for column, kind in enumerate(kinds):
        _panel(axes[column], report, kind, lambda cell: None if cell.seconds is None else 1e3 * cell.seconds)
        axes[column].set_title(TITLES[kind], fontsize="medium")
        _panel(axes[len(kinds) + column], report, kind, lambda cell: None if not cell.memory else cell.memory / 1e6)
        axes[len(kinds) + column].set_title(MEMORY_TITLES[kind], fontsize="medium")
    add_legend(figure)
    figure.suptitle(report.machine.description)
    write_picture(figure, path)


def _panel(axis: "Axes", report: BenchReport, kind: BenchKind, value: Callable[[BenchCell], float | None]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for number, label in enumerate(report.labels):
        cells = [report.cell(label, kind, length) for length in report.lengths]
        points = [(cell.length, y) for cell in cells if (y := value(cell)) is not None]
        if points:
            xs, ys = zip(*points)
            axis.plot(xs, ys, lw=1.6, label=label, **curve_style(number))
    axis.set_xscale("log", base=2)
    axis.set(yscale="log", xlabel="length (tokens)")
    axis.set_xticks(report.lengths, [f"{length:,}" for length in report.lengths], minor=False)
    axis.set_xticks([], minor=True)
    # values within one decade would otherwise have no tick labels
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
