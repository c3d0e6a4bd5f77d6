"""`manyformer train`: from a run file, a shipped run or a recipe's name to a trained model."""

import os
import shutil
import sys
import textwrap
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from manyformer.base.errors import UserError
from manyformer.cli.app import STOPPED, TRAIN, command
from manyformer.cli.console import print_heading, print_json, print_note, print_result
from manyformer.cli.options import complete_trainings, split_arguments

if TYPE_CHECKING:
    from manyformer.config import RunConfig, SettingHelp


@command(
    TRAIN,
    "manyformer train lm/stdlib",
    "manyformer train lm/stdlib --help                     all settings, with this run's values",
    "manyformer train transformer-lm data.path=book.txt depth=4 limits.minutes=10",
    "manyformer train mine.yaml --model.dim 256 out=runs/wide",
    accepts_settings=True,
    adds_help=False,
)
def train(
    context: typer.Context,
    arguments: Annotated[
        list[str] | None,
        Argument(
            metavar="NAME-OR-FILE [KEY=VALUE]...",
            help="A shipped run ('manyformer runs'), a run file, a run's folder or a recipe ('manyformer list'); then "
            "settings, as key=value, --key=value or --key value.",
            autocompletion=complete_trainings,
            show_default=False,
        ),
    ] = None,
    *,
    print_config: Annotated[bool, Option("--print-config", help="Validate the run, print its YAML, stop.")] = False,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Print the run and summaries of its model and data, and stop.")
    ] = False,
    every_weight: Annotated[
        bool, Option("--all", help="With --dry-run: name every weight, its optimizer and the rule that chose it.")
    ] = False,
    find_lr: Annotated[
        bool, Option("--find-lr", help="Try growing learning rates for some steps, suggest one, draw the loss, stop.")
    ] = False,
    fresh: Annotated[bool, Option("--fresh", help="Start over; an existing run's folder is renamed.")] = False,
    quiet: Annotated[bool, Option("--quiet", "-q", help="Print only the result.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print the result as JSON; the progress goes to stderr.")] = False,
    wants_help: Annotated[bool, Option("--help", "-h", help="Show this message, or all settings of a run.")] = False,
) -> None:
    """Train a model, or continue an interrupted run: the same command resumes it.

    Ctrl-C saves a checkpoint first. The run's folder (runs/NAME unless out=FOLDER is given) holds the merged run file,
    metrics, checkpoints, curves and the final model.
    """
    target, overrides = split_arguments(arguments or [])
    if wants_help and target is None:
        typer.echo(context.get_help(), nl=False)
        return
    run = _read(target, overrides)
    if every_weight and not dry_run:
        raise UserError("--all names weights where nothing is trained: it needs --dry-run")
    if wants_help:
        _print_settings(str(target), run)
    elif find_lr:
        if print_config or dry_run or fresh:
            raise UserError("--find-lr tries rates and stops: it goes with none of --print-config, --dry-run, --fresh")
        from manyformer.cli.train_output import print_rate_test

        print_rate_test(run, as_json=as_json)
    elif print_config or dry_run:
        from manyformer.config import dump_run

        # without the YAML, which would make the output no JSON
        if dry_run and as_json:
            from manyformer.cli.train_output import print_summary_as_json

            print_summary_as_json(run)
            return
        print_result(dump_run(run).rstrip())
        if dry_run:
            from manyformer.cli.train_output import print_summary

            print_summary(run, every_weight=every_weight)
    else:
        _train(run, fresh=fresh, quiet=quiet, as_json=as_json)


def _read(target: str | None, overrides: list[str]) -> "RunConfig":
    from manyformer.training.run_folder import as_training_run

    if target is None:
        raise UserError("train needs a name or a file; `manyformer runs` and `manyformer list` show them")
    return as_training_run(target, overrides)


def _print_settings(target: str, run: "RunConfig") -> None:
    """Print all settings of a run with its values as defaults, the recipe's keywords first."""
    from manyformer.config import describe_settings
    from manyformer.recipes import get_recipe

    recipe = get_recipe(run.recipe)
    options = "[--dry-run [--all]] [--print-config] [--find-lr] [--fresh] [--quiet] [--json]"
    print_result(f"Usage: manyformer train {target} [KEY=VALUE]... {options}", "")
    print_result(f"{recipe.card.name}: {recipe.card.title}. {recipe.card.summary}")
    rows = describe_settings(run, recipe.signature)
    print_heading(f"Keywords of {run.recipe}, with this run's values")
    for row in rows:
        if row.key.startswith("model."):
            _print_setting(row._replace(key=row.key.removeprefix("model.")))
    print_heading("Settings of the run, with its values")
    for row in rows:
        if not row.key.startswith("model."):
            _print_setting(row)
    print_heading("Examples")
    for settings in ("--dry-run", "limits.steps=100 out=runs/try", "--optim.lr 5e-4 --seed 1"):
        print_result(f"manyformer train {target} {settings}")


def _print_setting(setting: "SettingHelp") -> None:
    width = 100
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
    print_result(f"  {setting.key}={setting.default}   ({setting.type})")
    if setting.doc:
        print_result(textwrap.fill(setting.doc, width, initial_indent=" " * 6, subsequent_indent=" " * 6))


def _train(run: "RunConfig", *, fresh: bool, quiet: bool, as_json: bool) -> None:
    from manyformer.cli.train_output import AfterTraining
    from manyformer.training import silent, train

    if os.environ.get("RANK", "0") != "0":
        # one of several processes of torchrun: only rank 0 prints
        train(run, fresh=fresh, on_event=silent)
        return
    # standard output is for the one JSON document at the end
    out = sys.stderr if as_json else sys.stdout
    after_training = AfterTraining(out, quiet=quiet)
    with closing(after_training):
        result = train(run, fresh=fresh, on_event=after_training)
    try:
        after_training.show(run, result)
    except KeyboardInterrupt:
        print_note("\nstopped; the model is trained and saved")
        raise typer.Exit(STOPPED) from None
    if as_json:
        print_json(asdict(result))
