"""`manyformer advise`, also called `choose`: three recipes for a task, a length, a budget and a device.

What is not given is asked for where a person sits at a terminal."""

import sys
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from typer import Option

from manyformer.base.errors import UserError
from manyformer.cli.app import JUDGE, command
from manyformer.cli.console import Block, Output, PageTable, print_note

if TYPE_CHECKING:
    from manyformer.analysis.comparisons.advice import Advice, AdviceRow, Candidate

ADVICE_WIDTH = 79
MOST_ROWS = 15
"""The most measured rows that are shown within a screen."""
MOST_TASK_CHARACTERS = 34

_UNITS = {"kB": 1_000, "MB": 1_000_000, "GB": 1_000_000_000}


@command(
    JUDGE,
    "manyformer advise --length 16000 --task recall",
    "manyformer advise --length 16000 --memory 10MB --minutes 30",
    "manyformer advise --task masked-lm --length 2000 --parameters 100M --device h100",
    "manyformer advise --task translation --length 60 --device 'rtx-4070 12GB'",
    "manyformer advise --length 4096 --results comparisons/suite-full --json",
)
def advise(
    *,
    length: Annotated[
        int | None, Option(min=1, help="Tokens of the sequences; asked for on a terminal.", show_default=False)
    ] = None,
    task: Annotated[
        str | None,
        Option(
            help="A task of the suite, an ability such as recall, or a task of `manyformer list --task`; all of the "
            "suite without it.",
            show_default=False,
        ),
    ] = None,
    parameters: Annotated[
        str | None, Option(help="The most parameters of your model, such as 20M.", show_default=False)
    ] = None,
    memory: Annotated[
        str | None,
        Option(help="The most memory for the state of one sequence, such as 500kB, 10MB or 1GB.", show_default=False),
    ] = None,
    minutes: Annotated[
        float | None, Option(help="Leaves out what took more minutes to train where it was measured.")
    ] = None,
    device: Annotated[
        str | None,
        Option(help="cpu, a GPU such as h100, or any other with its memory: 'rtx-4070 12GB'.", show_default=False),
    ] = None,
    results: Annotated[
        str | None,
        Option(
            help="The folder of a suite, or its results.json; else that of suite/full or suite/quick, or the results "
            "of suite/full that come with the package.",
            show_default=False,
        ),
    ] = None,
    show_all: Annotated[bool, Option("--all", help="All measured rows that fit instead of three candidates.")] = False,
) -> Output:
    """Advise three recipes for a task, a length, a budget and a device, with the measured rows that this rests on.

    Language models are those of a suite; for other tasks the rows are those of the documentation's comparisons, of
    timed steps and of the ledger. Where nothing was measured it says so. Nothing is extrapolated but the size of the
    state for decoding, which follows from the model. A star marks what no other row is clearly better than. On a
    terminal it asks for what is not given if the length or the task is missing.
    """
    from manyformer.analysis.comparisons.advise import TEXT_TASKS
    from manyformer.analysis.comparisons.advise import advise as choose_recipes
    from manyformer.analysis.planning.accelerators import parse_quantity

    needs_length = task is None or task in TEXT_TASKS
    if sys.stdin.isatty() and (task is None or (length is None and needs_length)):
        task = task or _answer("Which task: recall, copying, states, translation, masked-lm, ... (Enter: all)?")
        length = length or _whole_number(_answer("How many tokens do your sequences have?"), "tokens, such as 4096")
        device = device or _answer("On which device: cpu, h100, 'rtx-4070 12GB', ... (Enter: cpu)?")
        parameters = parameters or _answer("At most how many parameters, such as 20M (Enter: any number)?")
        memory = memory or _answer("At most how much memory for the state of a sequence, such as 10MB (Enter: any)?")
        minutes = minutes or _whole_number(_answer("How many minutes of training (Enter: any)?"), "minutes")
    advice = choose_recipes(
        task=task,
        length=length,
        parameters=None if parameters is None else parse_quantity(parameters, "--parameters"),
        memory=None if memory is None else _parse_bytes(memory),
        minutes=minutes,
        device=device,
        results=results,
    )
    value = {
        "suite": advice.suite,
        "needs": advice.needs,
        "candidates": advice.candidates,
        "rows": advice.rows,
        "excluded": advice.excluded,
        "limits": advice.limits,
        "commands": advice.commands,
    }
    return Output(value, _all_rows(advice) if show_all else _candidates_page(advice))


command(None, name="choose", hidden=True)(advise)


def _answer(question: str) -> str | None:
    """What a person types; None for nothing."""
    print_note(question)
    return input().strip() or None


def _whole_number(text: str | None, meaning: str) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"'{text}' is no number of {meaning}")
    return int(text)


def _candidates_page(advice: "Advice") -> Iterator[Block]:
    """Three candidates with their reasons, the rows that were measured, and where they end."""
    yield _filled(f"for {advice.needs}:")
    if not advice.candidates:
        yield "nothing that was measured fits; give larger bounds, or --all for what was left out"
    for number, candidate in enumerate(advice.candidates, 1):
        yield _filled(f"{number}. {_described(candidate, advice)}", indent="   ", lines=4)
    shown = [row for candidate in advice.candidates for row in _shown_rows(candidate)]
    # cases of one recipe have its times in common
    unique = list({(row.task, row.case): row for row in shown}.values())
    if unique:
        yield ""
        cells = [(_short(row.task), _short(row.case), row.value, "*" * row.is_best) for row in unique[:MOST_ROWS]]
        yield PageTable(("measured", "case", "value", "best"), cells, right=(2,))
    yield ""
    for limit in advice.limits:
        yield _filled(f"note: {limit}", indent="  ")
    count = f"--all shows all {len(advice.rows)} rows, their sources, and what was left out ({len(advice.excluded)})"
    yield _filled(f"{count}. Next:")
    yield from advice.commands


def _described(candidate: "Candidate", advice: "Advice") -> str:
    """A candidate in a few sentences: why, its state, and what it was measured with."""
    sentences = [f"{candidate.recipe}: {candidate.reason}"]
    row = candidate.row
    if row is not None and row.state_bytes is not None and advice.needs.length is not None:
        sentences.append(f"its state takes {row.state_bytes / 1000:,.1f} kB")
    elif advice.suite is not None:
        sentences.append("it has no state for decoding")
    sentences += candidate.limits
    text = "; ".join(sentences) + "."
    if row is not None and row.keywords:
        sizes = " ".join(f"{name}={value}" for name, value in row.keywords.items())
        text += f" Measured with {sizes}."
    return text


def _shown_rows(candidate: "Candidate") -> "list[AdviceRow]":
    """The rows of a candidate that a screen has room for: the scores that are best, then times and counts."""
    scores = [row for row in candidate.rows if row.is_best][:3]
    costs = [row for row in candidate.rows if not row.is_best]
    return [*scores, *costs[-(5 - len(scores)) :]]


def _short(text: str) -> str:
    return textwrap.shorten(text, MOST_TASK_CHARACTERS, placeholder=" ...")


def _all_rows(advice: "Advice") -> Iterator[Block]:
    rows = []
    for row in advice.rows:
        longest = "–" if row.longest_score is None else f"{row.longest_score:.4g}"
        state = "–" if row.state_bytes is None else f"{row.state_bytes / 1000:,.1f}"
        rows.append((row.task, f"{row.case}{' *' * row.is_best}", row.value, longest, state))
    length = f" at {advice.needs.length:,}" if advice.needs.length else ""
    headers = ("measured", "case", "value", "at the greatest length", f"state kB{length}")
    yield PageTable(headers, rows, right=(2, 3, 4))
    yield ""
    sources = dict.fromkeys(row.source for row in advice.rows)
    yield from (f"source: {source}" for source in sources)
    for candidate in advice.candidates:
        yield from (f"published of {candidate.recipe}, not measured here: {figure}" for figure in candidate.published)
    yield from (f"left out: {case}, {reason}" for case, reason in advice.excluded.items())
    yield from (f"note: {limit}" for limit in advice.limits)


def _filled(text: str, *, indent: str = "", lines: int | None = None) -> str:
    return textwrap.fill(text, ADVICE_WIDTH, subsequent_indent=indent, max_lines=lines, break_on_hyphens=False)


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
