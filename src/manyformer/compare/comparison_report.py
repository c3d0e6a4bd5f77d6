"""What a comparison found: a record, told as a table for people, Markdown, JSON, CSV or a picture."""

import csv
import io
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from manyformer.compare.claims import ClaimVerdict, TableCell, judge, parse
from manyformer.compare.cost import StepCost
from manyformer.compare.scoring import kind_of
from manyformer.config.comparison import Comparison
from manyformer.train.durable_files import replace_text

NOTHING = "–"


@dataclass(frozen=True)
class CaseMeasurement:
    """What one case gave with one seed: the scores under each value of the sweep, or why there are none there."""

    case: str
    seed: int
    scores: tuple[dict[str, float | None], ...]
    why: tuple[str | None, ...]
    minutes: float | None
    steps: int
    tokens: int
    parameters: int | None


@dataclass(frozen=True)
class ComparisonResult:
    """A comparison and all that was measured; `steps` holds the cost of a training step of each case, where asked.

    `files` are what was written of it.
    """

    comparison: Comparison
    seeds: int
    measured: tuple[CaseMeasurement, ...]
    steps: dict[str, StepCost] = field(default_factory=dict)
    machine: str = ""
    files: tuple[Path, ...] = ()

    def of(self, case: str) -> list[CaseMeasurement]:
        """What a case gave, seed by seed."""
        return [one for one in self.measured if one.case == case]

    def values(self, case: str, score: str, index: int = 0) -> list[float]:
        """A score of a case under the sweep's value number `index`, seed by seed; empty where there is none."""
        found = [one.scores[index].get(score) for one in self.of(case)]
        return [value for value in found if value is not None]

    def mean(self, case: str, score: str, index: int = 0) -> float | None:
        """The mean over seeds; None where there is nothing."""
        values = self.values(case, score, index)
        return statistics.fmean(values) if values else None

    def deviation(self, case: str, score: str, index: int = 0) -> float | None:
        """The standard deviation over seeds (of a sample); None below two of them."""
        values = self.values(case, score, index)
        return statistics.stdev(values) if len(values) > 1 else None

    @property
    def cases(self) -> list[str]:
        return [case.name for case in self.comparison.cases]

    @property
    def verdicts(self) -> list[ClaimVerdict]:
        """What became of the claims."""
        file, values = self.comparison.file, self.comparison.values
        claims = [parse(text, self.cases, values, file.score, file.cost) for text in file.claims]
        return [judge(claim, partial(self._at, claim.score)) for claim in claims]

    @property
    def headers(self) -> list[str]:
        """The columns of the table."""
        return ["case", *(title for title, _ in self._columns())]

    @property
    def rows(self) -> list[list[str]]:
        """A row for each case, as text."""
        return [[case, *(tell(case) for _, tell in self._columns())] for case in self.cases]

    @property
    def notes(self) -> list[str]:
        """What must be known to read the table."""
        seeds = f"mean ± standard deviation over {self.seeds} seeds" if self.seeds > 1 else "one seed"
        taken = [
            f"{case.name} has the weights of {case.trained_by}" for case in self.comparison.cases if case.trained_by
        ]
        return [f"{seeds}; scored on the {self.comparison.file.split} data", *taken, *self._reasons()]

    def to_markdown(self) -> str:
        """The whole report as Markdown, with the picture beside it."""
        lines = [f"# {self.comparison.file.title}", "", *([self.comparison.about, ""] if self.comparison.about else [])]
        lines += ["| " + " | ".join(_escaped(self.headers)) + " |"]
        lines += ["| " + " | ".join(["---", *["---:"] * (len(self.headers) - 1)]) + " |"]
        lines += ["| " + " | ".join(_escaped(row)) + " |" for row in self.rows]
        lines += ["", *(f"- {note}" for note in self.notes), ""]
        lines += [f"- claim {_escaped([verdict.words])[0]}" for verdict in self.verdicts]
        return "\n".join([*lines, "", "![picture](picture.png)", "", f"Measured on {self.machine}.", ""])

    def to_json(self) -> str:
        """AllKeys: single values, means, deviations, claims, and the runs themselves."""
        comparison = self.comparison
        found = {
            "name": comparison.name,
            "title": comparison.file.title,
            "setting": comparison.setting,
            "values": list(comparison.values),
            "seeds": self.seeds,
            "table": [self._record(case) for case in self.cases],
            "claims": [verdict._asdict() for verdict in self.verdicts],
            "measured": [asdict(one) for one in self.measured],
            "runs": {case.name: case.run.model_dump(mode="json") for case in comparison.cases},
            "machine": self.machine,
        }
        return json.dumps(found, indent=2, ensure_ascii=False) + "\n"

    def to_csv(self) -> str:
        """One row for each case, seed, value of the sweep and score."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["case", "seed", self.comparison.setting or "setting", "score", "value"])
        for one in self.measured:
            for value, scores in zip(self.comparison.values, one.scores, strict=True):
                for score, number in scores.items():
                    writer.writerow([one.case, one.seed, "" if value is None else value, score, number])
        return text.getvalue()

    def save(self, folder: str | Path) -> list[Path]:
        """Write table.md, table.csv, results.json and picture.png; gives what was written."""
        from manyformer.compare.draw_comparison import draw

        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        texts = {"table.md": self.to_markdown(), "table.csv": self.to_csv(), "results.json": self.to_json()}
        for name, text in texts.items():
            replace_text(place / name, text)
        draw(self, place / "picture.png")
        return [place / name for name in (*texts, "picture.png")]

    def _columns(self) -> Iterator[tuple[str, Callable[[str], str]]]:
        for score in self.comparison.file.score:
            for index, value in enumerate(self.comparison.values):
                at = "" if value is None else f" at {value}"
                yield f"{label(score)}{at}", partial(self._cell, score, index)
        for cost in self.comparison.file.cost:
            yield COSTS[cost], partial(self._cost, cost)

    def _cell(self, score: str, index: int, case: str) -> str:
        mean, deviation = self.mean(case, score, index), self.deviation(case, score, index)
        digits = kind_of(score).digits
        if mean is None:
            return NOTHING
        return f"{mean:.{digits}f}" + ("" if deviation is None else f" ± {deviation:.{digits}f}")

    def _cost(self, cost: str, case: str) -> str:
        of, step = self.of(case), self.steps.get(case)
        if cost == "parameters":
            known = [one.parameters for one in of if one.parameters is not None]
            return f"{known[0]:,}" if known else NOTHING
        if cost == "minutes":
            minutes = [one.minutes for one in of if one.minutes is not None]
            return f"{statistics.fmean(minutes):.1f}" if minutes else NOTHING
        if cost == "tokens":
            return f"{statistics.fmean(one.tokens for one in of) / 1e6:.2f}" if of else NOTHING
        if step is None:
            return NOTHING
        if cost == "step":
            return f"{1e3 * step.seconds:.1f}"
        return NOTHING if step.memory is None else f"{step.memory / 1e6:.0f}"

    def _at(self, score: str, positions: TableCell) -> float | None:
        """What a claim is about."""
        if score in self.comparison.file.score:
            return self.mean(positions.case, score, positions.number)
        cell = self._cost(score, positions.case)
        return None if cell == NOTHING else float(cell.replace(",", ""))

    def _record(self, case: str) -> dict[str, Any]:
        cells = [
            {
                "value": value,
                "score": score,
                "mean": self.mean(case, score, index),
                "deviation": self.deviation(case, score, index),
            }
            for score in self.comparison.file.score
            for index, value in enumerate(self.comparison.values)
        ]
        step = self.steps.get(case)
        return {"case": case, "scores": cells, "step": None if step is None else step._asdict()}

    def _reasons(self) -> Iterator[str]:
        """Why there are dashes, the same reason once."""
        told: dict[str, None] = {}
        for one in self.measured:
            for value, why in zip(self.comparison.values, one.why, strict=True):
                if why is not None:
                    at = "" if value is None else f" at {self.comparison.setting} {value}"
                    told[f"{one.case}{at}: {why}"] = None
        return iter(told)


COSTS = {
    "parameters": "parameters",
    "minutes": "minutes of training",
    "tokens": "M tokens learned from",
    "step": "ms a step",
    "memory": "MB a step",
}


def label(score: str) -> str:
    """A score's name for people, with its unit."""
    name, unit = score.replace("_", " "), kind_of(score).unit
    return f"{name} ({unit})" if unit else name


def _escaped(cells: Sequence[str]) -> list[str]:
    return [cell.replace("|", "\\|") for cell in cells]
