"""`manyformer advise`: which recipe to take for a task, a length and a memory, from the measured rows of a suite."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from manyformer.cli.app import JUDGE, command
from manyformer.cli.console import Block, Output, PageTable
from manyformer.errors import UserError

if TYPE_CHECKING:
    from manyformer.compare.advise import Advice

_UNITS = {"kB": 1_000, "MB": 1_000_000, "GB": 1_000_000_000}


@command(
    JUDGE,
    "manyformer advise --length 16000 --task recall",
    "manyformer advise --length 16000 --memory 10MB",
    "manyformer advise --length 4096 --results comparisons/suite-full --json",
)
def advise(
    *,
    length: Annotated[int, Option(min=1, help="Tokens of the sequences.")],
    task: Annotated[
        str | None,
        Option(help="A task of the suite, or an ability such as recall; all without it.", show_default=False),
    ] = None,
    memory: Annotated[
        str | None,
        Option(help="The most memory for the state of one sequence, such as 500kB, 10MB or 1GB.", show_default=False),
    ] = None,
    results: Annotated[
        str | None,
        Option(
            help="The folder of a suite, or its results.json; else that of suite/full or suite/quick, or the results "
            "of suite/full that come with the package.",
            show_default=False,
        ),
    ] = None,
) -> Output:
    """Quote the measured rows of a suite that fit a task, a length and a memory, and say where they end.

    Scores are those of the suite's models; nothing is extrapolated but the size of the state for decoding, which
    follows from the model. A star marks the best case of a task and those that are not significantly worse.
    """
    from manyformer.compare.advise import advise as choose
    from manyformer.compare.advise import read_results
    from manyformer.compare.suite_runner import find_results

    memory_bytes = None if memory is None else _parse_bytes(memory)
    suite = read_results(find_results() if results is None else Path(results))
    advice = choose(suite, length=length, task=task, memory=memory_bytes)
    value = {"suite": suite.name, "rows": advice.rows, "excluded": advice.excluded, "limits": advice.limits}
    return Output(value, _page(advice, length))


def _page(advice: "Advice", length: int) -> Iterator[Block]:
    rows = []
    for row in advice.rows:
        longest = "–"
        if row.longest_score is not None:
            longest = f"{row.longest_score:.4g}"
        state = "–"
        if row.state_bytes is not None:
            state = f"{row.state_bytes / 1000:,.1f}"
        rows.append((row.task, f"{row.case}{' *' * row.is_best}", f"{row.score:.4g}", longest, state))
    headers = ("task", "case", "score", "at the greatest length", f"state kB at {length:,}")
    yield PageTable(headers, rows, right=(2, 3, 4))
    yield ""
    yield from (f"left out: {case}, {reason}" for case, reason in advice.excluded.items())
    yield from (f"note: {limit}" for limit in advice.limits)


def _parse_bytes(text: str) -> int:
    """The bytes that a text such as 10MB means. Raises UserError."""
    for unit, factor in _UNITS.items():
        if text.endswith(unit):
            try:
                number = float(text.removesuffix(unit))
            except ValueError:
                break
            if 0 < number < float("inf"):
                return int(number * factor)
    raise UserError(f"--memory ('{text}') must be a number with a unit: 500kB, 10MB or 1GB")
