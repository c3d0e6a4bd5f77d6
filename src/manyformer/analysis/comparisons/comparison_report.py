"""The result of a comparison, as a table, Markdown, JSON, CSV and a figure, and the files of these."""

import csv
import io
import statistics
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from manyformer.analysis.comparisons.claims import ClaimVerdict, TableCell, judge_claim, parse_claim
from manyformer.analysis.comparisons.scoring import score_kind
from manyformer.analysis.comparisons.sizing import is_as_large
from manyformer.analysis.comparisons.training_task import CaseFailure, CaseMeasurement, StepCost
from manyformer.base.files.atomic_files import atomic_write_text, make_folder
from manyformer.base.files.figures import PANEL_INCHES, QUIET_COLOR, curve_color, curve_style, panels, write_picture
from manyformer.base.files.json_text import json_text
from manyformer.base.files.text_tables import Table, aligned_table, escape_bars, printable
from manyformer.config.comparison import Comparison
from manyformer.data.generated.synthetic_floors import GuessFloors
from manyformer.inference.evaluate.eval_data import task_of_run
from manyformer.models.scores import is_comparable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NO_VALUE = "–"

MIN_LABEL_GAP = 0.045
"""The minimum distance of two labels, as a share of the axis."""

TITLE_CHARACTERS_PER_INCH = 7
"""The maximum number of title characters per inch of width."""


class CostColumn(NamedTuple):
    """A cost in the table: an attribute of the measurements, or of the step, the mean of which is multiplied.

    What adds up includes the cost of the case whose weights a case starts from."""

    title: str
    attribute: str
    format: str
    factor: float = 1.0
    of_step: bool = False
    adds_up: bool = False


COST_COLUMNS = {
    "parameters": CostColumn("parameters", "parameters", ",.0f"),
    "minutes": CostColumn("minutes of training", "minutes", ".1f"),
    "total": CostColumn("minutes of training in all", "minutes", ".1f", adds_up=True),
    "tokens": CostColumn("M training tokens", "tokens", ".2f", 1e-6),
    "step": CostColumn("ms a step", "seconds", ".1f", 1e3, of_step=True),
    "memory": CostColumn("MB a step", "memory", ".0f", 1e-6, of_step=True),
}


@dataclass(frozen=True)
class ComparisonResult:
    """A comparison and its measurements; `steps` holds the cost of a training step of each case, if requested.

    `measurements` are those of the best trials, `trials` those of all trials, and `files` the files that were written;
    `guesses` are the floors of generated data, None where the main score is not the accuracy.
    """

    comparison: Comparison
    seeds: int
    measurements: tuple[CaseMeasurement, ...]
    steps: dict[str, StepCost] = field(default_factory=dict)
    machine: str = ""
    files: tuple[Path, ...] = ()
    trials: tuple[CaseMeasurement, ...] = ()
    guesses: GuessFloors | None = None
    failures: tuple[CaseFailure, ...] = ()
    """The trainings that have failed; their cases have no mean."""

    def measurements_of(self, case: str) -> list[CaseMeasurement]:
        """The measurements of a case, one per seed."""
        return [measurement for measurement in self.measurements if measurement.case == case]

    def values(self, case: str, score: str, index: int = 0) -> list[float]:
        """A score of a case at index `index` of the sweep, one per seed.

        Missing scores and those that are no finite numbers are left out."""
        scores = [measurement.scores[index].get(score) for measurement in self.measurements_of(case)]
        return [value for value in scores if value is not None and is_comparable(value)]

    def mean(self, case: str, score: str, index: int = 0) -> float | None:
        """The mean over seeds; None if the score is missing, or is no finite number with one of the seeds."""
        scores = [measurement.scores[index].get(score) for measurement in self.measurements_of(case)]
        # a mean over the other seeds would favor a case that diverged or failed with one
        if any(value is not None and not is_comparable(value) for value in scores) or self._has_failed(case):
            return None
        values = self.values(case, score, index)
        if values:
            return statistics.fmean(values)
        return None

    def deviation(self, case: str, score: str, index: int = 0) -> float | None:
        """The sample standard deviation over seeds; None for fewer than two."""
        values = self.values(case, score, index)
        if len(values) > 1:
            return statistics.stdev(values)
        return None

    def _has_failed(self, case: str) -> bool:
        return any(failure.case == case for failure in self.failures)

    @property
    def cases(self) -> list[str]:
        return [case.name for case in self.comparison.cases]

    @property
    def verdicts(self) -> list[ClaimVerdict]:
        """Whether each claim holds."""
        file = self.comparison.file
        values = self.comparison.values
        claims = [parse_claim(text, self.cases, values, file.score, file.cost) for text in file.claims]
        return [judge_claim(claim, partial(self._cell_value, claim.score)) for claim in claims]

    @property
    def headers(self) -> list[str]:
        """The columns of the table."""
        return ["case", *(title for title, _ in self._columns())]

    @property
    def rows(self) -> list[list[str]]:
        """A row for each case, as text."""
        return [[case, *(cell(case) for _, cell in self._columns())] for case in self.cases]

    def __str__(self) -> str:
        """The table of all cases, and what the report says of it."""
        lines = aligned_table([self.headers, *self.rows])
        return printable("\n".join([self.comparison.file.title, "", *lines, "", *self.notes, *self.claims]))

    @property
    def picture(self) -> Path | None:
        """The picture that was written; None before."""
        return next((file for file in self.files if file.suffix == ".png"), None)

    @property
    def tables(self) -> list[Table]:
        """The table of all cases, with the title of the comparison."""
        return [Table(self.comparison.file.title, self.headers, self.rows)]

    @property
    def claims(self) -> list[str]:
        """Whether each claim holds, in words."""
        return [f"claim {verdict.summary_line}" for verdict in self.verdicts]

    @property
    def notes(self) -> list[str]:
        """Notes on the table: seeds, split, shared weights, and the reasons for missing scores."""
        seeds = "one seed"
        if self.seeds > 1:
            seeds = f"mean ± standard deviation over {self.seeds} seeds"
        cases = [case for case in self.comparison.cases if case.trained_by]
        shared_weights = [f"{case.name} has the weights of {case.trained_by}" for case in cases]
        trained = [f"{seeds}; scored on the {self.comparison.file.split} data", *self._trial_notes()]
        if self.guesses is not None:
            floors = [self.guesses.summary_line]
        else:
            floors = []
        failures = [f"{failure.name} has failed: {failure.reason}" for failure in self.failures]
        return [*failures, *trained, *floors, *self._size_notes(), *shared_weights, *self.missing_reasons]

    @property
    def missing_reasons(self) -> list[str]:
        """The distinct reasons for missing scores, each with its case and the value of the sweep.

        Scores that are no finite numbers count as missing: a mean without them would favor a case that diverged."""
        reasons: dict[str, None] = {}
        for measurement in self.measurements:
            for value, reason, scores in zip(
                self.comparison.values, measurement.reasons, measurement.scores, strict=True
            ):
                place = measurement.case + ("" if value is None else f" at {self.comparison.setting} {value}")
                if reason is not None:
                    reasons[f"{place}: {reason}"] = None
                for score, number in scores.items():
                    if number is not None and not is_comparable(number):
                        problem = f"{score.replace('_', ' ')} is {number:g} with seed {measurement.seed}"
                        reasons[f"{place}: {problem}, so it has no mean"] = None
        return list(reasons)

    def _trial_notes(self) -> Iterator[str]:
        """What the trials of each case scored on the validation data, and which is the best."""
        if not self.trials:
            return
        score = self.comparison.file.score[0].replace("_", " ")
        yield f"trials are trained with one seed; the best by the validation {score} is trained with every seed"
        for case in self.cases:
            trials = [trial for trial in self.trials if trial.case == case]
            best = {measurement.trial for measurement in self.measurements_of(case)}
            texts = []
            for trial in trials:
                selection = NO_VALUE if trial.selection is None else f"{trial.selection:.4g}"
                mark = " (best)" if trial.trial in best else ""
                texts.append(f"{trial.trial}: {selection}{mark}")
            if texts:
                yield f"trials of {case}: {'; '.join(texts)}"

    def _size_notes(self) -> Iterator[str]:
        """Cases whose models are not as large as the reference's: data may decide sizes that were assumed."""
        reference = self.comparison.file.reference
        sizes = {measurement.case: measurement.parameters for measurement in self.measurements}
        if reference is None or not (expected := sizes.get(reference)):
            return
        for case, size in sizes.items():
            if size is not None and not is_as_large(size, expected):
                yield f"{case} has {size:,} parameters with its vocabulary, {reference} has {expected:,}"

    def to_markdown(self) -> str:
        """The report as Markdown, with a link to the figure in the same folder."""
        lines = [f"# {self.comparison.file.title}", ""]
        # what does not hold stands first, above all tables
        if refuted := [verdict for verdict in self.verdicts if verdict.holds is False]:
            lines += [f"**{escape_bars(verdict.summary_line)}**\n" for verdict in refuted]
        lines += [self.comparison.about, ""] if self.comparison.about else []
        lines += [*self.tables[0].markdown, "", *(f"- {note}" for note in self.notes), ""]
        lines += [f"- {escape_bars(claim)}" for claim in self.claims]
        return printable("\n".join([*lines, "", "![picture](picture.png)", "", f"Measured on {self.machine}.", ""]))

    def to_json(self) -> str:
        """All results as JSON: single values, means, deviations, claims, and the runs."""
        comparison = self.comparison
        content = {
            "name": comparison.name,
            "title": comparison.file.title,
            "setting": comparison.setting,
            "values": list(comparison.values),
            "seeds": self.seeds,
            "table": [self._case_record(case) for case in self.cases],
            "claims": [verdict._asdict() for verdict in self.verdicts],
            "measured": [asdict(measurement) for measurement in self.measurements],
            "trials": [asdict(measurement) for measurement in self.trials],
            "failures": [{"case": f.case, "training": f.name, "reason": f.reason} for f in self.failures],
            "runs": {case.name: case.run.model_dump(mode="json", by_alias=True) for case in comparison.cases},
            "machine": self.machine,
        }
        return json_text(content, indent=2) + "\n"

    def to_csv(self) -> str:
        """One row for each case, seed, value of the sweep and score."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["case", "seed", self.comparison.setting or "setting", "score", "value"])
        for measurement in self.measurements:
            for value, scores in zip(self.comparison.values, measurement.scores, strict=True):
                prefix = [measurement.case, measurement.seed, "" if value is None else value]
                writer.writerows([*prefix, *score] for score in scores.items())
        return text.getvalue()

    def _columns(self) -> Iterator[tuple[str, Callable[[str], str]]]:
        for score in self.comparison.file.score:
            for index, value in enumerate(self.comparison.values):
                suffix = "" if value is None else f" at {value}"
                yield f"{score_label(score)}{suffix}", partial(self._score_cell, score, index)
        for cost in self.comparison.file.cost:
            yield COST_COLUMNS[cost].title, partial(self._cost_cell, cost)

    def _score_cell(self, score: str, index: int, case: str) -> str:
        mean = self.mean(case, score, index)
        deviation = self.deviation(case, score, index)
        digits = score_kind(score).digits
        if mean is None:
            return NO_VALUE
        # a bound never stands beside a likelihood as if it were one
        sign = "<= " if score in task_of_run(self.comparison.case(case).run).bounds else ""
        return f"{sign}{mean:.{digits}f}" + ("" if deviation is None else f" ± {deviation:.{digits}f}")

    def _cost_cell(self, cost: str, case: str) -> str:
        column = COST_COLUMNS[cost]
        value = self._cost(column, case)
        if value is None:
            return NO_VALUE
        return f"{value * column.factor:{column.format}}"

    def _cost(self, column: "CostColumn", case: str) -> float | None:
        """The mean over seeds, with that of the case whose weights it starts from if these costs add up."""
        records = [self.steps.get(case)] if column.of_step else self.measurements_of(case)
        values = [value for record in records if (value := getattr(record, column.attribute, None)) is not None]
        mean = statistics.fmean(values) if values else None
        source = self.comparison.case(case).init_from_case
        if mean is None or source is None or not column.adds_up:
            return mean
        # a case that continues another one has paid for both trainings
        earlier = self._cost(column, source)
        if earlier is None:
            return None
        return mean + earlier

    def _cell_value(self, score: str, table_cell: TableCell) -> float | None:
        """The value of a score or cost in a cell, for claims."""
        if score in self.comparison.file.score:
            return self.mean(table_cell.case, score, table_cell.value_index)
        # the value as the table shows it: a claim holds for the numbers that people read
        text = self._cost_cell(score, table_cell.case)
        if text == NO_VALUE:
            return None
        return float(text.replace(",", ""))

    def _case_record(self, case: str) -> dict[str, Any]:
        cells = []
        for score in self.comparison.file.score:
            for index, value in enumerate(self.comparison.values):
                mean = self.mean(case, score, index)
                deviation = self.deviation(case, score, index)
                cells.append({"value": value, "score": score, "mean": mean, "deviation": deviation})
        step = self.steps.get(case)
        return {"case": case, "scores": cells, "step": None if step is None else step._asdict()}


def score_label(score: str) -> str:
    """The display name of a score, with its unit."""
    name = score.replace("_", " ")
    unit = score_kind(score).unit
    if unit:
        return f"{name} ({unit})"
    return name


def spell_duration(seconds: float) -> str:
    """A duration in hours and minutes, or in seconds below two minutes."""
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    hours, minutes = divmod(round(seconds / 60), 60)
    parts = [
        f"{number} {unit}{'s' * (number > 1)}" for number, unit in ((hours, "hour"), (minutes, "minute")) if number
    ]
    return " ".join(parts)


def write_comparison(result: ComparisonResult, folder: Path) -> ComparisonResult:
    """Write table.md, table.csv, results.json and picture.png, and return the result with their paths."""
    texts = {"table.md": result.to_markdown(), "table.csv": result.to_csv(), "results.json": result.to_json()}
    files = write_texts(folder, texts)
    draw_comparison(result, folder / "picture.png")
    return replace(result, files=(*files, folder / "picture.png"))


def write_texts(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    make_folder(folder)
    for name, text in texts.items():
        atomic_write_text(folder / name, text)
    return [folder / name for name in texts]


def draw_comparison(result: ComparisonResult, path: Path) -> None:
    """Write the figure to `path`, with one panel per score."""
    scores = result.comparison.file.score
    if result.comparison.setting:
        extra_rows = 0
    else:
        extra_rows = max(0, len(result.cases) - 8)
    figure, axes = panels(1, len(scores), (PANEL_INCHES[0] * 1.35, PANEL_INCHES[1] * 1.25 + 0.28 * extra_rows))
    if result.comparison.setting is None:
        plot = _plot_cases
    else:
        plot = _plot_sweep
    for axis, score in zip(axes, scores):
        plot(axis, result, score)
    figure.suptitle(textwrap.fill(result.comparison.file.title, int(TITLE_CHARACTERS_PER_INCH * figure.get_figwidth())))
    write_picture(figure, path)


def _plot_sweep(axis: "Axes", result: ComparisonResult, score: str) -> None:
    """Plot a curve per case over the swept values, with standard deviations as error bars and a label at its end."""
    values = result.comparison.values
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) == len(values):
        positions = [float(v) for v in numbers]
    else:
        positions = list(map(float, range(len(values))))
    ends: list[tuple[float, float, str, str]] = []
    for case_index, case in enumerate(result.cases):
        points = [(x, result.mean(case, score, i), result.deviation(case, score, i)) for i, x in enumerate(positions)]
        measured = [(x, y, 0.0 if d is None else d) for x, y, d in points if y is not None]
        if measured:
            xs, ys, deviations = zip(*measured)
            axis.errorbar(xs, ys, yerr=deviations, lw=1.6, capsize=2.5, **curve_style(case_index))
            ends.append((xs[-1], ys[-1], case, curve_color(case_index)))
    # lengths that double would crowd at the left of a linear axis
    if len(numbers) == len(values) and min(positions) > 0 and max(positions) / min(positions) >= 4:
        axis.set_xscale("log", base=2)
    axis.set_xticks(positions, [f"{v:,}" if isinstance(v, int) else str(v) for v in values])
    axis.set_xticks([], minor=True)
    axis.set(xlabel=str(result.comparison.setting), ylabel=_axis_label(score))
    _label_curve_ends(axis, ends)


def _label_curve_ends(axis: "Axes", ends: list[tuple[float, float, str, str]]) -> None:
    """Write each case's name next to the end of its curve, with a minimum gap between names at the same x."""
    low, high = axis.get_ylim()
    gap = MIN_LABEL_GAP * (high - low)
    for position in {x for x, _, _, _ in ends}:
        labels = sorted((end for end in ends if end[0] == position), key=lambda end: end[1])
        heights = _spread_labels([y for _, y, _, _ in labels], gap)
        for (x, _, name, color), height in zip(labels, heights):
            # an offset in points keeps the name off the marker at any scale
            axis.annotate(name, (x, height), (7, 0), textcoords="offset points", color=color, va="center", size="small")
        low = min(low, heights[0] - gap)
        high = max(high, heights[-1] + gap)
    # names that were pushed apart may stand above and below the curves
    axis.set_ylim(low, high)


def _spread_labels(heights: list[float], gap: float) -> list[float]:
    """Sorted label heights with a gap of at least `gap`: the mean of pushing labels up and pushing them down."""
    raised = list(heights)
    lowered = list(heights)
    for i in range(1, len(heights)):
        # either pass alone would move all names to one side of their curves
        raised[i] = max(raised[i], raised[i - 1] + gap)
        lowered[-i - 1] = min(lowered[-i - 1], lowered[-i] - gap)
    return [(a + b) / 2 for a, b in zip(raised, lowered)]


def _plot_cases(axis: "Axes", result: ComparisonResult, score: str) -> None:
    """Plot a row per case: single seeds as small dots, their mean as a large one."""
    cases = result.cases
    for case_index, case in enumerate(cases):
        values = result.values(case, score)
        if values:
            # single seeds, because a mean of three hides how far they lie apart
            axis.plot(values, [case_index] * len(values), ".", color=QUIET_COLOR, ms=5, zorder=2)
            mean = result.mean(case, score)
            deviation = result.deviation(case, score)
            assert mean is not None
            axis.errorbar([mean], [case_index], xerr=[deviation or 0.0], fmt="o", color=curve_color(0), ms=6, capsize=3)
            label = f"{mean:.{score_kind(score).digits}f}"
            place = (mean, case_index)
            axis.annotate(label, place, (0, 7), textcoords="offset points", ha="center", fontsize="x-small")
    axis.set_yticks(range(len(cases)), cases)
    # downwards, in the order of the table
    axis.set_ylim(len(cases) - 0.4, -0.6)
    axis.set_xlabel(_axis_label(score))


def _axis_label(score: str) -> str:
    return f"{score_label(score)}, {'less' if score_kind(score).lower_is_better else 'more'} is better"
