"""`manyformer train`: from a run file, a shipped run or a recipe's name to a trained model."""

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from manyformer.cli.app import STOPPED, TRAIN, app, examples

if TYPE_CHECKING:
    from manyformer.config import RunConfig
    from manyformer.train import TrainResult


@app.command(
    "train",
    rich_help_panel=TRAIN,
    add_help_option=False,
    context_settings={"ignore_unknown_options": True},
    epilog=examples(
        "manyformer train lm/stdlib",
        "manyformer train lm/stdlib --help                     all settings, with this run's values",
        "manyformer train transformer-lm data.path=book.txt depth=4 limits.minutes=10",
        "manyformer train mine.yaml --model.dim 256 out=runs/wide",
    ),
)
def train(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME-OR-FILE [KEY=VALUE]...",
            help="A shipped run ('manyformer runs'), a run file, a run's folder or a recipe ('manyformer list'); then "
            "settings, as key=value, --key=value or --key value.",
            show_default=False,
        ),
    ] = None,
    *,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the whole run as YAML, checked, and stop.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the whole run and the model it makes, and stop.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over; an earlier run is moved aside.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show the end of the run only.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON; the progress goes to stderr.")
    ] = False,
    wants_help: Annotated[
        bool, typer.Option("--help", "-h", help="Show this message, or with a name all its settings, and exit.")
    ] = False,
) -> None:
    """Train a model, or go on with a run that was interrupted: the same command continues it.

    Ctrl-C saves first. Everything is kept in the run's folder (runs/NAME unless out=FOLDER is given): the merged run
    file, metrics, checkpoints, curves and the final model.
    """
    from manyformer.cli.split_arguments import split_words, with_options

    target, overrides = split_words(words or [])
    if wants_help and target is None:
        typer.echo(context.get_help(), nl=False)
        return
    run = with_options(context, overrides, lambda: _read(target, overrides))
    if wants_help:
        from manyformer.cli.settings_help import print_settings

        print_settings(str(target), run)
    elif print_config or dry_run:
        _print_plan(run, summary=dry_run)
    else:
        _train(run, fresh=fresh, quiet=quiet, as_json=as_json)


def _read(target: str | None, overrides: list[str]) -> "RunConfig":
    from manyformer.cli.read_run import read_run
    from manyformer.errors import UserError

    if target is None:
        raise UserError("train needs a name or a file; `manyformer runs` and `manyformer list` show what there is")
    return read_run(target, overrides)


def _print_plan(run: "RunConfig", *, summary: bool) -> None:
    from manyformer.cli.console import print_result
    from manyformer.config import dump_run

    print_result(dump_run(run).rstrip())
    if summary:
        from manyformer.cli.dry_run import print_summary

        print_summary(run)


def _train(run: "RunConfig", *, fresh: bool, quiet: bool, as_json: bool) -> None:
    from contextlib import closing

    from manyformer.cli.after_training import AfterTraining
    from manyformer.cli.console import print_error, print_note
    from manyformer.train import TrainingInterrupted, silent, train

    if os.environ.get("RANK", "0") != "0":
        # torchrun has started us beside a first process, which speaks for all
        train(run, fresh=fresh, on_event=silent)
        return
    out = sys.stderr if as_json else sys.stdout
    ending = AfterTraining(out, quiet=quiet)
    try:
        with closing(ending):
            result = train(run, fresh=fresh, on_event=ending)
    except TrainingInterrupted as stop:
        print_error(str(stop), mark="")
        raise typer.Exit(STOPPED) from None
    try:
        ending.show(run, result)
    except KeyboardInterrupt:
        print_note("\nstopped; the model is trained and saved")
        raise typer.Exit(STOPPED) from None
    if as_json:
        _print_result(result)


def _print_result(result: "TrainResult") -> None:
    from dataclasses import asdict

    from manyformer.cli.console import print_json

    print_json(asdict(result))
