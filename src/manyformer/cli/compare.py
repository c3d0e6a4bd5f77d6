"""`manyformer compare`: several trainings alike, one table, one picture."""

from typing import TYPE_CHECKING, Annotated

import typer

from manyformer.cli.app import JUDGE, STOPPED, app, examples

if TYPE_CHECKING:
    from manyformer.compare import ComparisonResult
    from manyformer.config.comparison import Comparison


@app.command(
    "compare",
    rich_help_panel=JUDGE,
    context_settings={"ignore_unknown_options": True},
    epilog=examples(
        "manyformer compare                                        the comparisons that come with the package",
        "manyformer compare positions/extrapolation --dry-run      what it would do",
        "manyformer compare positions/extrapolation --seeds 3",
        "manyformer compare mine.yaml limits.steps=100 --out try",
    ),
)
def compare(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME-OR-FILE [KEY=VALUE]...]",
            help="A shipped comparison or a file; then settings of 'manyformer train', laid over all of its cases. "
            "Without a name: the list of shipped ones.",
            show_default=False,
        ),
    ] = None,
    *,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="How often each case is trained; the file says unless given.")
    ] = None,
    out: Annotated[str | None, typer.Option(help="The folder of all runs, the table and the picture.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be trained and scored, and stop.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Print the file, to make one like it, and stop.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over; the earlier comparison is moved aside.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole result as JSON.")] = False,
) -> None:
    """Train the cases of a comparison alike, score them alike, and show one table and one picture.

    The file has a base run ([bold]run:[/bold], as in a run file, [bold]extends:[/bold] too) and [bold]cases:[/bold],
    each a name and the settings in which it differs; a case with [bold]trained: OTHER[/bold] takes the weights of that
    one. [bold]seeds:[/bold] says how often each is trained, [bold]score:[/bold] what is told of it (loss, accuracy,
    bleu, ...), [bold]sweep:[/bold] one setting under whose values the trained models are scored again, such as
    data.length, [bold]cost:[/bold] what else (parameters, minutes, tokens, step, memory), [bold]claims:[/bold] what
    should come out, such as 'alibi@256 <= alibi@64 + 0.03'.

    A score that a model cannot have, say beyond its longest sequence, is a dash and its reason stands below. Every
    training is kept: after Ctrl-C or a kill the same command goes on. All is written to comparisons/NAME unless --out
    is given: table.md, table.csv, results.json, picture.png and a run's folder for each case and seed.
    """
    from manyformer.cli.split_arguments import split_words, with_options

    target, overrides = split_words(words or [])
    if target is None and not overrides:
        _list(as_json=as_json)
        return
    if show:
        _show(target)
        return
    comparison = with_options(context, overrides, lambda: _read(target, overrides))
    if dry_run:
        _print_plan(comparison, seeds or comparison.file.seeds)
    else:
        _compare(comparison, seeds=seeds, out=out, fresh=fresh, as_json=as_json)


def _list(*, as_json: bool) -> None:
    from manyformer.cli.console import print_json, print_result, print_table
    from manyformer.config import about_run, shipped_comparisons

    found = {name: about_run(path) for name, path in shipped_comparisons().items()}
    if as_json:
        print_json([{"name": name, "about": about} for name, about in found.items()])
        return
    print_table(("comparison", "about"), list(found.items()))
    print_result()
    print_result("`manyformer compare NAME` carries one out, with --dry-run it says what that is.")


def _show(target: str | None) -> None:
    from manyformer.cli.console import print_result
    from manyformer.config.comparison import find_comparison

    print_result(find_comparison(target or "")[1].read_text(encoding="utf-8").rstrip())


def _read(target: str | None, overrides: list[str]) -> "Comparison":
    from manyformer.compare.compare import read
    from manyformer.errors import UserError

    if target is None:
        raise UserError("compare needs a name or a file before the settings; `manyformer compare` lists the names")
    return read(target, overrides)


def _print_plan(comparison: "Comparison", seeds: int) -> None:
    from manyformer.cli.console import print_result, print_table
    from manyformer.config import differences

    print_result(
        f"{comparison.file.title}: {sum(case.trained_by is None for case in comparison.cases) * seeds} trainings"
    )
    print_result()
    first = comparison.cases[0]
    rows = []
    for case in comparison.cases:
        changed = [] if case is first else [line.replace(", now ", " -> ") for line in differences(first.run, case.run)]
        own = f"weights of {case.trained_by}; " if case.trained_by else ""
        rows.append((case.name, case.run.recipe, own + "; ".join(changed)))
    print_table(("case", "recipe", f"differs from {first.name} in"), rows)
    print_result()
    under = (
        "" if comparison.setting is None else f" under {comparison.setting} {', '.join(map(str, comparison.values))}"
    )
    print_result(f"scored by {', '.join(comparison.file.score)} on the {comparison.file.split} data{under}")
    for claim in comparison.file.claims:
        print_result(f"claim: {claim}")


def _compare(comparison: "Comparison", *, seeds: int | None, out: str | None, fresh: bool, as_json: bool) -> None:
    from manyformer.cli.console import print_error, print_note, print_result, status_line
    from manyformer.compare import compare as carry_out
    from manyformer.train import TrainingInterrupted

    try:
        with status_line(f"comparing {comparison.name}") as status:
            found = carry_out(comparison, seeds=seeds, out=out, fresh=fresh, each=status, tell=print_note)
    except TrainingInterrupted as stop:
        print_error(str(stop), mark="")
        raise typer.Exit(STOPPED) from None
    print_result(found.to_json().rstrip()) if as_json else _print(found)


def _print(found: "ComparisonResult") -> None:
    from manyformer.cli.console import print_result, print_table

    print_result(found.comparison.file.title)
    print_result()
    print_table(found.headers, found.rows, right=range(1, len(found.headers)))
    print_result()
    for line in found.notes:
        print_result(f"note: {line}")
    for verdict in found.verdicts:
        print_result(f"claim {verdict.words}")
    for file in found.files:
        print_result(f"wrote {file}")
