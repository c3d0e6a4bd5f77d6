"""`manyformer compare`: train and score several cases under equal conditions."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from manyformer.base.errors import UserError
from manyformer.cli.app import JUDGE, command
from manyformer.cli.console import (
    Block,
    Output,
    PageTable,
    print_note,
    print_output,
    print_page,
    print_result,
    status_line,
)
from manyformer.cli.options import AllOption, JsonOption, complete_comparisons, split_arguments, split_commas

if TYPE_CHECKING:
    from manyformer.analysis.comparisons import ComparisonResult
    from manyformer.analysis.comparisons.suite_report import SuiteResult
    from manyformer.analysis.comparisons.suite_runner import SuiteOptions
    from manyformer.config.comparison import Comparison
    from manyformer.config.suite import Suite


@command(
    JUDGE,
    "manyformer compare                                        the comparisons that come with the package",
    "manyformer compare positions/extrapolation --dry-run      what would be trained",
    "manyformer compare positions/extrapolation --seeds 3",
    "manyformer compare mine.yaml limits.steps=100 --out try",
    "manyformer compare suite/quick --jobs 2 --dry-run         how long it takes",
    "manyformer compare suite/quick --recipes transformer-lm,rfa --jobs 2",
    accepts_settings=True,
)
def compare(
    arguments: Annotated[
        list[str] | None,
        Argument(
            metavar="[NAME-OR-FILE [KEY=VALUE]...]",
            help="A shipped comparison or a file; then settings of 'manyformer train', laid over all of its cases. "
            "Without a name: the list of shipped ones.",
            autocompletion=complete_comparisons,
            show_default=False,
        ),
    ] = None,
    *,
    seeds: Annotated[int | None, Option(min=1, help="Trainings of each case; from the file unless given.")] = None,
    out: Annotated[str | None, Option(help="The folder of all runs, the table and the picture.")] = None,
    jobs: Annotated[int, Option(min=1, help="Trainings at once, each in a process with one thread.")] = 1,
    recipes: Annotated[
        str | None,
        Option(
            metavar="A,B,...",
            help="Of a suite: only these of its cases, and any other recipes; 'all' adds every recipe that fits.",
        ),
    ] = None,
    max_hours: Annotated[
        float | None, Option(help="Of a suite: begin no training that would end later; the same command continues.")
    ] = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Print what would be trained and scored (of a suite: and how long), and stop.")
    ] = False,
    show: Annotated[bool, Option("--show", help="Print the comparison's file and stop.")] = False,
    fresh: Annotated[bool, Option("--fresh", help="Start over; the earlier comparison is moved aside.")] = False,
    show_all: AllOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train and score the cases of a comparison in the same way, and show one table and one picture.

    The file has a base run ([bold]run:[/bold], as in a run file, also with [bold]extends:[/bold]) and
    [bold]cases:[/bold], each a name and the settings in which it differs; a case with [bold]trained: CASE[/bold] takes
    the weights of that case. [bold]seeds:[/bold] is the number of trainings of each, [bold]score:[/bold] the scores
    (loss, accuracy, bleu, ...), [bold]sweep:[/bold] one setting with values under which the trained models are scored
    again, such as data.length, [bold]trials:[/bold] settings such as optim.lr with values that each case is trained
    with, of which the best counts, [bold]cost:[/bold] the costs in the table (parameters, minutes, tokens, step,
    memory), [bold]claims:[/bold] the expected results, such as 'alibi@256 <= alibi@64 + 0.03'.

    A suite has [bold]tasks:[/bold] as well, and compares its cases, of equal size, on each of them.

    A score that a model cannot have, for example beyond its max_length, is a dash with the reason in a note. All
    trainings are saved: after Ctrl-C or a kill the same command continues. Results are in comparisons/NAME unless --out
    is given: table.md, table.csv, results.json, picture.png and a run's folder for each case and seed.
    """

    target, overrides = split_arguments(arguments or [])
    if target is None and not overrides:
        print_output(_shipped(show_all=show_all), as_json=as_json)
        return
    if show:
        from manyformer.config.load_comparison import find_comparison

        print_result(find_comparison(target or "")[1].read_text(encoding="utf-8").rstrip())
        return
    from manyformer.analysis.comparisons import compare as carry_out_comparison
    from manyformer.analysis.comparisons.compare import check_comparison
    from manyformer.analysis.comparisons.suite_report import SuiteResult
    from manyformer.analysis.comparisons.suite_runner import SuiteOptions, run_suite
    from manyformer.config.comparison import Comparison

    # its class decides what the other options mean
    comparison = _read(target, overrides, split_commas(recipes))
    carry_out: Callable[..., ComparisonResult | SuiteResult]
    if isinstance(comparison, Comparison):
        for name, value in (("--recipes", recipes), ("--max-hours", max_hours)):
            if value is not None:
                raise UserError(f"{name} is for suites, which have tasks; {target} is none")
        if dry_run:
            print_page(_plan_page(comparison, seeds or comparison.file.seeds))
            # last: the plan is known without the data
            with status_line(f"checking {comparison.name}") as status:
                check_comparison(comparison, seeds, out, on_progress=status)
            return
        carry_out = partial(carry_out_comparison, comparison, seeds=seeds, jobs=jobs)
    else:
        options = SuiteOptions(seeds, jobs, max_hours)
        if dry_run:
            print_page(_suite_plan_page(comparison, options, out))
            return
        carry_out = partial(run_suite, comparison, options)
    with status_line(f"comparing {comparison.name}") as status:
        result = carry_out(out=out, fresh=fresh, on_progress=status, log=print_note)
    if as_json:
        print_result(result.to_json().rstrip())
    else:
        print_page(_result_page(result))
    failures = [failure for _, failure in result.failures] if isinstance(result, SuiteResult) else result.failures
    for failure in failures:
        if not isinstance(failure.error, UserError):
            # a defect: --debug shows where it is
            raise failure.error
    if failures:
        count = "a training has failed" if len(failures) == 1 else f"{len(failures)} trainings have failed"
        raise UserError(f"{count}, as the notes say; the same command repeats what failed and keeps the rest")


def _shipped(*, show_all: bool) -> Output:
    from manyformer.config import run_description, shipped_comparisons
    from manyformer.config.shipped import first_sentence

    comparisons = {name: run_description(path) for name, path in shipped_comparisons().items()}
    value = [{"name": name, "about": about} for name, about in comparisons.items()]
    advice = "`manyformer compare NAME` runs one, --dry-run prints its plan, --all says more."
    if show_all:
        return Output(value, [PageTable(("comparison", "about"), comparisons.items()), "", advice])
    if sys.stdout.isatty():
        # one row for each would not fit a screen
        groups: dict[str, list[str]] = {}
        for name in comparisons:
            groups.setdefault(name.partition("/")[0], []).append(name)
        rows = [(group, ", ".join(names)) for group, names in groups.items()]
        return Output(value, [PageTable(("about", "comparisons"), rows), "", advice])
    sentences = {name: first_sentence(about) for name, about in comparisons.items()}
    return Output(value, [PageTable(("comparison", "about"), sentences.items()), "", advice])


def _read(target: str | None, overrides: list[str], chosen: list[str]) -> "Comparison | Suite":
    from manyformer.analysis.comparisons.compare import read_comparison
    from manyformer.analysis.comparisons.suite_runner import read_suite
    from manyformer.config.suite import is_suite

    if target is None:
        raise UserError("compare needs a name or a file before the settings; `manyformer compare` lists the names")
    if is_suite(target):
        return read_suite(target, overrides, chosen)
    return read_comparison(target, overrides)


def _plan_page(comparison: "Comparison", seeds: int) -> Iterator[Block]:
    from manyformer.config import differences

    # the trials of a case share its first seed, the best goes on with the others
    trainings = sum(len(case.trials) + seeds - 1 for case in comparison.cases if case.trained_by is None)
    yield f"{comparison.file.title}: {trainings} trainings\n"
    first = comparison.cases[0]
    rows = []
    for case in comparison.cases:
        if case is first:
            changed = []
        else:
            changed = [line.replace(", now ", " -> ") for line in differences(first.run, case.run)]
        weights_note = ""
        if case.trained_by:
            weights_note = f"weights of {case.trained_by}; "
        rows.append((case.name, case.run.recipe, weights_note + "; ".join(changed)))
    yield PageTable(("case", "recipe", f"differs from {first.name} in"), rows)
    values = ", ".join(map(str, comparison.values))
    sweep_note = ""
    if comparison.setting is not None:
        sweep_note = f" under {comparison.setting} {values}"
    yield f"\nscored by {', '.join(comparison.file.score)} on the {comparison.file.split} data{sweep_note}"
    yield from (f"claim: {claim}" for claim in comparison.file.claims)


def _suite_plan_page(suite: "Suite", options: "SuiteOptions", out: str | None) -> Iterator[Block]:
    from manyformer.analysis.comparisons.comparison_report import spell_duration
    from manyformer.analysis.comparisons.suite_runner import plan_suite

    # a plan is made of timed steps, which takes a while
    with status_line(f"timing {suite.name}") as status:
        plan = plan_suite(suite, options, out, on_progress=status)
    yield f"{suite.file.title}\n"
    rows = []
    for name in suite.cases:
        cases = [case for case in plan.cases if case.case == name]
        trainings = sum(case.trainings for case in cases)
        # a case trains once for each task and seed, and tasks differ in length
        seconds = sum(case.trainings * case.seconds for case in cases)
        rows.append((name, str(trainings), spell_duration(seconds)))
    yield PageTable(("case", "trainings", "time of one job"), rows, right=(1,))
    yield f"\ntasks: {', '.join(task.name for task in suite.tasks)}"
    yield plan.summary_line


def _result_page(result: "ComparisonResult | SuiteResult") -> Iterator[Block]:
    for table in result.tables:
        yield f"{table.title}\n"
        yield PageTable(table.headers, table.rows, right=range(1, len(table.headers)))
        yield ""
    yield from (f"note: {line}" for line in result.notes)
    yield from result.claims
    yield from (f"wrote {file}" for file in result.files)
