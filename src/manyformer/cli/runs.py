"""`manyformer runs`: the run files shipped with the package."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from manyformer.base.errors import UserError, suggest_names
from manyformer.base.files.atomic_files import atomic_copy
from manyformer.cli.app import TRAIN, app, command, examples_epilog
from manyformer.cli.console import Output, PageTable, print_json, print_output, print_result
from manyformer.cli.options import AllOption, complete_shipped_runs

runs = typer.Typer(rich_markup_mode="rich", help="List, show and copy the run files shipped with the package.")
app.add_typer(
    runs,
    name="runs",
    rich_help_panel=TRAIN,
    epilog=examples_epilog(
        "manyformer runs", "manyformer runs show lm/stdlib", "manyformer runs copy lm/stdlib mine.yaml"
    ),
)

Name = Annotated[
    str,
    Argument(help="The name of a shipped run, as 'manyformer runs' lists it.", autocompletion=complete_shipped_runs),
]


@runs.callback(invoke_without_command=True)
def _default(context: typer.Context, *, show_all: AllOption = False) -> None:
    if context.invoked_subcommand is None:
        print_output(list_runs(show_all=show_all), as_json=False)


@command(None, "manyformer runs list --json", name="list", group=runs)
def list_runs(*, show_all: AllOption = False) -> Output:
    """List the shipped runs with the first sentence of their descriptions; --all adds the recipe and the rest."""
    from manyformer.config import run_description, shipped_runs
    from manyformer.config.shipped import first_sentence

    shipped = [
        {"name": name, "recipe": _recipe(path), "about": run_description(path), "path": path}
        for name, path in shipped_runs().items()
    ]
    if show_all:
        table = PageTable(("run", "recipe", "about"), [(run["name"], run["recipe"], run["about"]) for run in shipped])
    else:
        rows = [(run["name"], first_sentence(str(run["about"]))) for run in shipped]
        table = PageTable(("run", "about"), rows, cut=True)
    advice = "`manyformer train NAME` starts one, `runs copy NAME` copies it, --all says more."
    return Output(shipped, [table, "", advice])


@command(None, "manyformer runs show lm/stdlib", name="show", group=runs)
def show_run(name: Name) -> None:
    """Print a run file with its comments."""
    print_result(_path(name).read_text(encoding="utf-8").rstrip())


@command(None, "manyformer runs copy lm/stdlib", "manyformer runs copy lm/stdlib mine.yaml", name="copy", group=runs)
def copy_run(
    name: Name,
    to: Annotated[Path | None, Argument(help="The target file; NAME.yaml in the current folder unless given.")] = None,
    *,
    force: Annotated[bool, Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Copy a run file, for changes."""
    source = _path(name)
    if to is None:
        target = Path(source.name)
    else:
        # as `cp` does
        target = to / source.name if to.is_dir() else to
    if target.suffix not in (".yaml", ".yml"):
        raise UserError(f"{target}: a run file's name must end in .yaml")
    if target.exists() and not force:
        raise UserError(f"{target} exists already; choose another name, or replace it with --force")
    atomic_copy(source, target)
    print_result(f"wrote {target}; train it with `manyformer train {target}`")


@command(None, "manyformer runs schema > run.schema.json", name="schema", group=runs)
def run_schema() -> None:
    """Print the JSON Schema of run files, for completion and validation in editors."""
    from manyformer.base.plugins import TASK_GROUP, import_entry_points
    from manyformer.config import json_schema

    # kinds of data of installed packages
    import_entry_points(TASK_GROUP)
    print_json(json_schema())


def _path(name: str) -> Path:
    from manyformer.config import shipped_runs

    shipped = shipped_runs()
    if name not in shipped:
        raise UserError(f"there is no shipped run '{name}'; {suggest_names(name, shipped)}")
    return shipped[name]


def _recipe(path: Path) -> str:
    """The recipe that a run file names, or the one that it extends."""
    from manyformer.config.load import extends_chain
    from manyformer.config.setting_layers import stack

    layers, _ = extends_chain(path)
    # a run file that extends another one may leave the recipe to it
    return str(stack(layers).data["recipe"])
