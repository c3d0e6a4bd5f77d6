"""What was measured besides suites, as it comes with the package: scores, steps, decoding, counts, published figures.

Nothing here needs torch, so that it is read at once."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

from annotated_types import Ge, Gt
from pydantic import Field

from manyformer.analysis.comparisons.suite_results import LooseRecord
from manyformer.base.files.json_records import read_json, validate_json
from manyformer.config.shipped import COUNTED_COSTS, DECODING_COSTS, LEDGER, MEASURED_SCORES, STEP_COSTS

Length = Annotated[int, Ge(1)]
RecordType = TypeVar("RecordType", bound=LooseRecord)


class ScoredRecipe(LooseRecord):
    """The score of a recipe in a comparison: the mean of its seeds, their deviation, and the minutes of a training.

    `note` says what the case has beside its keywords."""

    recipe: str
    note: str = ""
    value: float
    spread: float = 0.0
    minutes: float | None = None
    keywords: dict[str, Any] = Field(default_factory=dict)


class ScoredComparison(LooseRecord):
    """The scores of a comparison that a page of the documentation shows, those of the plainest recipe first."""

    task: str
    of: str
    measure: str
    unit: str = ""
    lower_is_better: bool = False
    length: Length | None = None
    seeds: Annotated[int, Gt(0)]
    page: str
    command: str
    rows: tuple[ScoredRecipe, ...]

    @property
    def title(self) -> str:
        """The score with its unit."""
        return f"{self.measure} ({self.unit})" if self.unit else self.measure

    @property
    def source(self) -> str:
        """Where it stands, and what measures it again."""
        seeds = "one seed" if self.seeds == 1 else f"{self.seeds} seeds"
        return f"docs/{self.page}, {seeds}: {self.command}"

    def is_best(self, row: ScoredRecipe) -> bool:
        """Whether no other row is better by more than the deviations of both."""
        sign = -1 if self.lower_is_better else 1
        return all(sign * (other.value - row.value) <= row.spread + other.spread for other in self.rows)

    def places(self) -> dict[str, int]:
        """The place of each recipe by its best case, from 1."""
        sign = 1 if self.lower_is_better else -1
        ordered = sorted(self.rows, key=lambda row: sign * row.value)
        recipes = list(dict.fromkeys(row.recipe for row in ordered))
        return {recipe: recipes.index(recipe) + 1 for recipe in recipes}


class _Scores(LooseRecord):
    comparisons: tuple[ScoredComparison, ...]


class StepTime(LooseRecord):
    """The processor's seconds of a training step of one row."""

    recipe: str
    length: Length
    seconds: float


class StepTimes(LooseRecord):
    """The training steps of recipes at equal sizes."""

    sizes: dict[str, Any]
    torch: str
    steps: tuple[StepTime, ...]

    def at(self, recipes: Sequence[str], length: int) -> dict[str, StepTime]:
        """The steps of the recipes at the measured length that is nearest, by their names."""
        lengths = {step.length for step in self.steps if step.recipe in recipes}
        nearest = min(lengths, key=lambda measured: abs(measured - length), default=None)
        return {step.recipe: step for step in self.steps if step.recipe in recipes and step.length == nearest}


class DecodingCell(LooseRecord):
    """Seconds of a decoded token after a text of that length, and the bytes of the state."""

    label: str
    length: Length
    lower_quartile: float
    memory: int


class _Decoding(LooseRecord):
    cells: tuple[DecodingCell, ...]


class PublishedFigure(LooseRecord):
    """A published figure of a recipe, and ours where it was measured."""

    recipe: str
    measure: str
    published: str
    source: str
    ours: str | None = None
    seeds: int | None = None
    command: str | None = None
    page: str | None = None


class _Ledger(LooseRecord):
    records: tuple[PublishedFigure, ...]


class CountedCost(NamedTuple):
    """Operations of a forward pass over `length` tokens with the sizes of the paper, and the bytes of the state."""

    length: int
    flops: int
    state_bytes: int | None


def _read(file: Path, title: str, record_type: type[RecordType]) -> RecordType:
    record: RecordType = validate_json(read_json(file, title), record_type, file)
    return record


@cache
def scored_comparisons() -> tuple[ScoredComparison, ...]:
    """The scores on the pages of the documentation, and ours of the ledger."""
    pages = _read(MEASURED_SCORES, "measured scores", _Scores).comparisons
    return (*pages, *_ledger_comparisons())


def _ledger_comparisons() -> Iterator[ScoredComparison]:
    """Our figures of the ledger: a comparison for each data set, whose recipes were measured in the same way."""
    by_data: dict[str, list[PublishedFigure]] = {}
    for figure in published_figures():
        # what is measured is the score and the data, as in "test accuracy on Cora with 64 features, %"
        if figure.ours and (match := re.match(r"test accuracy on (\w+)", figure.measure)):
            by_data.setdefault(match[1], []).append(figure)
    for data, figures in by_data.items():
        rows = tuple(_own_figure(figure) for figure in figures)
        yield ScoredComparison(
            task="graph-nodes",
            of=data,
            measure="accuracy",
            unit="%",
            seeds=figures[0].seeds or 1,
            page=figures[0].page or "",
            command=figures[0].command or "",
            rows=rows,
        )


def _own_figure(figure: PublishedFigure) -> ScoredRecipe:
    """Our figure, a mean and a deviation as in `83.07 ± 0.68`."""
    mean, _, deviation = (figure.ours or "").partition(" ± ")
    return ScoredRecipe(recipe=figure.recipe, value=float(mean), spread=float(deviation or 0))


@cache
def step_times() -> StepTimes:
    """The training steps of recipes that no suite compares."""
    return _read(STEP_COSTS, "measured steps", StepTimes)


@cache
def decoding_cells() -> tuple[DecodingCell, ...]:
    """State and speed of decoding by length."""
    return _read(DECODING_COSTS, "measured decoding", _Decoding).cells


@cache
def published_figures() -> tuple[PublishedFigure, ...]:
    """The ledger."""
    return _read(LEDGER, "the ledger", _Ledger).records


@cache
def counted_costs() -> dict[str, list[CountedCost]]:
    """The counted costs of each recipe by length."""
    records = read_json(COUNTED_COSTS, "counted costs")
    return {name: [CountedCost(*cost) for cost in costs] for name, costs in records.items()}


def state_by_growth(sizes: Mapping[int, int | None], length: int, *, grows: bool) -> int | None:
    """The bytes of a state at a length, from those at others: as they are, constant, or growing by equal steps.

    None where they do not say it. `grows` is what the card says of the state."""
    if length in sizes:
        return sizes[length]
    points = sorted((measured, size) for measured, size in sizes.items() if size is not None)
    if len(points) < 2:
        return None
    (shorter, shorter_size), (longer, longer_size) = points[-2:]
    if shorter_size == longer_size and length >= shorter:
        return longer_size
    # a window that is not full yet would stop growing at a length that nobody measured
    if not grows or length < points[0][0]:
        return None
    return longer_size + (longer_size - shorter_size) * (length - longer) // (longer - shorter)
