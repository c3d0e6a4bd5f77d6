"""The report of a check: one row per contract, as a table or as JSON."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, final

from manyformer.analysis.contracts.leak_place import LeakPlace
from manyformer.analysis.contracts.report_page import PageContent, PageRow, badge_json, badge_svg, report_html
from manyformer.base.errors import UserError
from manyformer.base.files.json_text import json_text
from manyformer.base.files.text_tables import aligned_table

if TYPE_CHECKING:
    from rich.table import Table

ContractVerdict = Literal["passed", "failed", "not promised", "not run"]

SCHEMA = 1
"""The version of the JSON of a report; it rises if a key goes or changes its meaning, not if one is added."""

STYLES = {"passed": "green", "failed": "bold red", "not promised": "dim", "not run": "yellow"}


class ContractRow(NamedTuple):
    """One contract: its verdict, a sentence, the measured number that decided it and its upper bound.

    `place` says where a broken one is broken, as far as that was found.
    """

    contract: str
    verdict: ContractVerdict
    sentence: str
    measured: float | None = None
    tolerance: float | None = None
    place: LeakPlace | None = None


class CheckLengths(NamedTuple):
    """The lengths of sequences: in tests of many steps, in those of few calls, and of the probe of causality."""

    steps: int
    long: int
    probe: int | None = None

    def __str__(self) -> str:
        probe = ""
        if self.probe is not None:
            probe = f" and a few of {self.probe}"
        long = ""
        if self.long != self.steps:
            long = f", causality at {self.long}"
        return f"at {self.steps} tokens{long}{probe}"


@final
@dataclass(frozen=True)
class CheckReport:
    """The contracts of one model, with the lengths of the sequences and the seed of the inputs.

    `assumptions` are sentences about what was found out about the model instead of being told.
    """

    subject: str
    rows: tuple[ContractRow, ...]
    lengths: CheckLengths
    seed: int
    assumptions: tuple[str, ...] = ()

    @property
    def heading(self) -> str:
        """The model and the lengths of the sequences, beyond which nothing was tested."""
        return f"{self.subject} {self.lengths}"

    @property
    def length(self) -> int:
        """The length of the sequences in which every token was exchanged."""
        return self.lengths.long

    @property
    def ok(self) -> bool:
        """Whether no contract failed; contracts that are not promised or were not run do not count as failures."""
        return not self.failed

    @property
    def failed(self) -> tuple[ContractRow, ...]:
        """The rows of the contracts that failed."""
        return tuple(row for row in self.rows if row.verdict == "failed")

    def __getitem__(self, contract: str) -> ContractRow:
        """The row of the contract with this name. Raises KeyError if it was left out."""
        return {row.contract: row for row in self.rows}[contract]

    def summary(self) -> str:
        """One line with the count of each verdict."""
        counts = {verdict: sum(row.verdict == verdict for row in self.rows) for verdict in STYLES}
        return f"{self.subject}: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)

    def table(self) -> str:
        """The report as plain text: a heading with the lengths, one line per contract and a summary.

        The place of a broken contract follows its line.
        """
        shown, others = self._split_rows()
        rows = [
            (row.contract, row.verdict, _format_number(row.measured), _format_number(row.tolerance), row.sentence)
            for row in shown
        ]
        header, *table = aligned_table([("contract", "verdict", "measured", "at most", "result"), *rows])
        lines = [self.heading, *(f"  {assumption}" for assumption in self.assumptions), header]
        for row, line in zip(shown, table, strict=True):
            lines.append(line)
            if row.place is not None:
                lines += [f"  {text}" for text in row.place.lines(78)]
        for line in _reasons(others):
            lines += textwrap.wrap(line, 80, subsequent_indent="  ", break_on_hyphens=False)
        return "\n".join([*lines, self.summary()])

    def _split_rows(self) -> tuple[list[ContractRow], list[ContractRow]]:
        """The rows that are shown each, and those without a result, which have only reasons.

        Of a model whose form was found by trial most contracts are not promised, and they would hide the others.
        """
        if not self.assumptions:
            return list(self.rows), []
        shown = [row for row in self.rows if row.verdict in ("passed", "failed") or row.measured is not None]
        return shown, [row for row in self.rows if row not in shown]

    def __str__(self) -> str:
        return self.table()

    def rich(self) -> "Table":
        """The report as a colored table for the terminal."""
        from rich.markup import escape
        from rich.table import Table

        shown, others = self._split_rows()
        title = escape("\n".join((self.heading, *self.assumptions)))
        caption = escape("\n".join([*_reasons(others), self.summary()]))
        table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
        for heading in ("contract", "verdict"):
            table.add_column(heading, no_wrap=True)
        for heading in ("measured", "at most"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("result")
        for row in shown:
            style = STYLES[row.verdict]
            numbers = _format_number(row.measured), _format_number(row.tolerance)
            result = [row.sentence]
            if row.place is not None:
                result += row.place.lines()
            table.add_row(row.contract, f"[{style}]{row.verdict}[/]", *numbers, escape("\n".join(result)))
        return table

    def to_json(self) -> str:
        """Strict JSON of schema `SCHEMA`, in which non-finite numbers are strings."""
        # `length` is older than `lengths`, and scripts read it
        report = {"subject": self.subject, "ok": self.ok, "length": self.length, "lengths": self.lengths._asdict()}
        report |= {"seed": self.seed, "rows": [_json_row(row) for row in self.rows]}
        report |= {"schema": SCHEMA, "assumptions": list(self.assumptions)}
        return json_text(report, indent=2, ensure_ascii=True)

    @property
    def outcome(self) -> str:
        """The verdict in two words, for a badge: "kept", "2 broken", or "none tried" if no contract was run."""
        if self.failed:
            return f"{len(self.failed)} broken"
        if any(row.verdict == "passed" for row in self.rows):
            return "kept"
        return "none tried"

    def to_html(self, *, command: str | None = None) -> str:
        """The report as one page of HTML that needs no other file; `command` is what repeats the check."""
        rows = tuple(
            PageRow(*row[:3], _format_number(row.measured), _format_number(row.tolerance), row.place)
            for row in self.rows
        )
        content = PageContent(
            subject=self.subject,
            outcome=self.outcome,
            counts=self.summary().removeprefix(f"{self.subject}: "),
            lengths=str(self.lengths),
            assumptions=self.assumptions,
            rows=rows,
            command=command or f"mf.check(model, seed={self.seed})",
            seed=self.seed,
        )
        return report_html(content)

    def write_html(self, path: str | Path, *, command: str | None = None) -> None:
        """Write the page of `to_html` to a file. Raises UserError if it cannot be written."""
        _write_text(path, self.to_html(command=command))

    def write_badge(self, path: str | Path) -> None:
        """Write the badge to a file: a picture if its name ends with .svg, else JSON. Raises UserError if it cannot."""
        picture = str(path).endswith(".svg")
        _write_text(path, self.badge_svg() if picture else self.badge_json())

    def badge_json(self) -> str:
        """A badge such as "contracts: kept" or "contracts: 2 broken", as JSON for the endpoint of shields.io."""
        return badge_json(self.outcome, ok=self.ok)

    def badge_svg(self) -> str:
        """The same badge as a picture."""
        return badge_svg(self.outcome, ok=self.ok)


def _write_text(path: str | Path, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None


def _reasons(rows: Sequence[ContractRow]) -> list[str]:
    """A line for each reason why contracts have no result, with their names."""
    names: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        reason = row.sentence.removeprefix(f"{row.verdict}: ")
        names.setdefault((row.verdict, reason), []).append(row.contract)
    return [f"{verdict}: {', '.join(contracts)} ({reason})" for (verdict, reason), contracts in names.items()]


def _format_number(value: float | None) -> str:
    if value is None:
        return ""
    # counts and exact zeros are shown as integers; sums and means as such; rounding errors in powers of ten
    if math.isfinite(value) and value == int(value):
        return str(int(value))
    if 1 < value < 1000:
        return f"{value:.4g}"
    return f"{value:.1e}"


def _json_row(row: ContractRow) -> dict[str, Any]:
    place = None if row.place is None else row.place.as_json()
    return row._asdict() | {"measured": _json_number(row.measured), "place": place}


def _json_number(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return value
    return str(value)
