"""What a check found: one row a contract, as a table for people and as JSON for scripts."""

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, final

if TYPE_CHECKING:
    from rich.table import Table

ContractVerdict = Literal["passed", "failed", "not promised", "not run"]

STYLES: dict[ContractVerdict, str] = {
    "passed": "green",
    "failed": "bold red",
    "not promised": "dim",
    "not run": "yellow",
}


class ContractRow(NamedTuple):
    """One contract: its verdict, the number that decided it and the most it may be, and a sentence."""

    contract: str
    verdict: ContractVerdict
    sentence: str
    measured: float | None = None
    tolerance: float | None = None


@final
@dataclass(frozen=True)
class CheckReport:
    """All contracts of one model; `length` is the longest sequence that was tried, `seed` drew the inputs."""

    subject: str
    rows: tuple[ContractRow, ...]
    length: int
    seed: int

    @property
    def ok(self) -> bool:
        """Whether no promise is broken; what is not promised or was not run is no breach."""
        return not self.failed

    @property
    def failed(self) -> tuple[ContractRow, ...]:
        """The broken promises."""
        return tuple(row for row in self.rows if row.verdict == "failed")

    def __getitem__(self, contract: str) -> ContractRow:
        """The row of that contract. Raises KeyError where it was left out."""
        for row in self.rows:
            if row.contract == contract:
                return row
        raise KeyError(contract)

    def summary(self) -> str:
        """One line: how many of each verdict."""
        counts = {verdict: sum(row.verdict == verdict for row in self.rows) for verdict in STYLES}
        return f"{self.subject}: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)

    def table(self) -> str:
        """Plain text for people: one line a contract and a summary."""
        cells = [(row.contract, row.verdict, _number(row.measured), _number(row.tolerance)) for row in self.rows]
        heads = ("contract", "verdict", "measured", "at most")
        widths = [max(len(line[column]) for line in [heads, *cells]) for column in range(len(heads))]
        sentences = ["what it says", *(row.sentence for row in self.rows)]
        lines = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths)), sentence])
            for line, sentence in zip([heads, *cells], sentences)
        ]
        return "\n".join([*lines, self.summary()])

    def __str__(self) -> str:
        return self.table()

    def rich(self) -> "Table":
        """The same for a terminal, in colour."""
        from rich.table import Table

        table = Table(title=self.subject, caption=self.summary(), title_justify="left", caption_justify="left")
        for head in ("contract", "verdict"):
            table.add_column(head, no_wrap=True)
        for head in ("measured", "at most"):
            table.add_column(head, justify="right", no_wrap=True)
        table.add_column("what it says")
        for row in self.rows:
            style = STYLES[row.verdict]
            numbers = _number(row.measured), _number(row.tolerance)
            table.add_row(row.contract, f"[{style}]{row.verdict}[/]", *numbers, _escape(row.sentence))
        return table

    def to_json(self) -> str:
        """Strict JSON: `{"subject", "ok", "length", "seed", "rows": [...]}`; what is not finite is a string."""
        rows = [row._asdict() | {"measured": _plain(row.measured), "tolerance": row.tolerance} for row in self.rows]
        whole = {"subject": self.subject, "ok": self.ok, "length": self.length, "seed": self.seed, "rows": rows}
        return json.dumps(whole, indent=2, allow_nan=False)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return str(int(value)) if math.isfinite(value) and value == int(value) else f"{value:.1e}"


def _plain(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
