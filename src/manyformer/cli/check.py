"""`manyformer check`: test the contracts of a model."""

import sys
from typing import Annotated

import typer
from typer import Argument, Option

from manyformer.base.errors import UserError
from manyformer.cli.app import DEFECT, JUDGE, command
from manyformer.cli.console import print_result, status_line
from manyformer.cli.model_arguments import is_folder, read_keywords
from manyformer.cli.options import JsonOption, KeywordsArgument, complete_models, split_commas


@command(
    JUDGE,
    "manyformer check transformer-lm",
    "manyformer check compose position=learned --only causal,cached",
    "manyformer check runs/lm-stdlib --json",
    accepts_settings=True,
)
def check(
    name: Annotated[
        str,
        Argument(help="A recipe, built tiny, or the folder of a run or a saved model.", autocompletion=complete_models),
    ],
    keywords: KeywordsArgument = None,
    *,
    length: Annotated[
        int | None,
        Option(
            help="Tokens in each sequence; by default 48, and up to 512, each exchanged once, in tests of causality."
        ),
    ] = None,
    only: Annotated[str | None, Option(help="Only these contracts, separated by commas.")] = None,
    skip: Annotated[str | None, Option(help="All but these contracts, separated by commas.")] = None,
    seed: Annotated[int, Option(help="Seed of weights and inputs.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Test a model's contracts: causality, caching, padding, packing, gradients, precision, saving and more.

    Ends with exit code 1 if a contract fails. Contracts that a recipe does not promise are listed with the reason.
    """
    from manyformer.recipes import get_recipe

    model_keywords = None
    if not is_folder(name):
        model_keywords = read_keywords(get_recipe(name), keywords)
    elif keywords:
        raise UserError(f"'{keywords[0]}' is for a recipe; the model in {name} is built already")
    from manyformer.analysis.contracts import check as run_check

    with status_line(f"checking {name}") as status:
        report = run_check(
            name,
            length=length,
            seed=seed,
            only=None if only is None else split_commas(only),
            skip=split_commas(skip),
            keywords=model_keywords or None,
            on_row=lambda row: status(f"checking {name}: {row.contract} {row.verdict}"),
        )
    if as_json:
        print_result(report.to_json())
    elif sys.stdout.isatty():
        from rich.console import Console

        Console().print(report.rich())
    else:
        print_result(report.table())
    if not report.ok:
        raise typer.Exit(DEFECT)
