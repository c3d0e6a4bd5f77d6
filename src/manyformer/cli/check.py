"""`manyformer check`: test the contracts of a model."""

import inspect
import sys
from collections.abc import Sequence
from dataclasses import fields
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from manyformer.analysis.contracts.command import (
    CODE_WARNING,
    EXIT_CODES,
    NAME_HELP,
    VALUES_HELP,
    CheckRequest,
    CommandFace,
    load_stranger,
    option_flag,
    run_checks,
)
from manyformer.base.errors import UserError
from manyformer.cli.app import JUDGE, command
from manyformer.cli.console import print_error, print_note, print_result, status_line
from manyformer.cli.model_arguments import is_folder, read_keywords
from manyformer.cli.options import F, complete_models

if TYPE_CHECKING:
    from manyformer.analysis.contracts import CheckReport
    from manyformer.analysis.contracts.loading import LoadedModel

ENDINGS = (".py", ".pt", ".pth", ".pt2", ".ts", ".bin", ".safetensors", ".ckpt")
"""How files end that hold a model of somebody else."""


HELP = f"""Test a model's contracts: causality, caching, padding, packing, gradients, precision and more.

Of a recipe, contracts that it does not promise are listed with the reason. {VALUES_HELP} {CODE_WARNING}

{EXIT_CODES}"""


def _with_shared_options(function: F) -> F:
    """Replace the parameter `**options` by the options of both programs, and give the function their help."""
    function.__doc__ = HELP
    (first, *_) = inspect.signature(function).parameters.values()
    parameters = [first]
    for item in fields(CheckRequest):
        option = Option(option_flag(item), help=item.metadata["help"], metavar=item.metadata["metavar"])
        annotation = Annotated[item.type, option]  # type: ignore[name-defined]
        parameters.append(Parameter(item.name, Parameter.KEYWORD_ONLY, default=item.default, annotation=annotation))
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return function


@command(
    JUDGE,
    "manyformer check transformer-lm",
    "manyformer check compose position=learned --only causal,cached",
    "manyformer check runs/lm-stdlib --json",
    "manyformer check model.py:GPT n_layer=2",
    accepts_settings=True,
)
@_with_shared_options
def check(
    names: Annotated[
        list[str] | None,
        Argument(
            metavar="NAME [KEY=VALUE]",
            help=f"A recipe, built tiny, or the folder of a run or a saved model; or {NAME_HELP}",
            autocompletion=complete_models,
        ),
    ] = None,
    **options: Any,
) -> None:
    face = CommandFace(program="manyformer check", load=_load, status=status_line, show=_show, show_error=print_error)
    code = run_checks(names or [], CheckRequest(**options), face)
    if code:
        raise typer.Exit(code)


def _load(name: str, values: Sequence[str], request: CheckRequest) -> "LoadedModel":
    """A recipe, the folder of a model, or what is in a file of somebody else."""
    from manyformer.analysis.contracts.loading import LoadedModel, load_folder
    from manyformer.analysis.own_models import find_own_subject
    from manyformer.recipes import get_recipe, recipe_names

    if name not in recipe_names() and not Path(name).is_dir() and (":" in name or name.endswith(ENDINGS)):
        return load_stranger(name, values, request)
    if not is_folder(name):
        keywords = read_keywords(get_recipe(name), list(values))
        return LoadedModel(find_own_subject(name, keywords, request.seed))
    if values:
        raise UserError(f"'{values[0]}' is for a recipe; the model in {name} is built already")
    try:
        return LoadedModel(find_own_subject(name, {}, request.seed))
    except UserError as error:
        if not (Path(name) / "config.json").is_file():
            raise
        try:
            loaded = load_folder(Path(name))
        except UserError:
            # what this library says of the folder comes first
            raise error from None
        print_note(f"checked as transformers computes it, because it cannot be converted: {error}")
        return loaded


def _show(report: "CheckReport") -> None:
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(report.rich())
    else:
        print_result(report.table())
