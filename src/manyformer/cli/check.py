"""`manyformer check`: test the contracts of a model."""

from typing import Annotated

import typer

from manyformer.cli.app import DEFECT, JUDGE, app, examples


@app.command(
    "check",
    rich_help_panel=JUDGE,
    context_settings={"ignore_unknown_options": True},
    epilog=examples(
        "manyformer check transformer-lm",
        "manyformer check compose position=learned --only causal,cached",
        "manyformer check runs/lm-stdlib --json",
    ),
)
def check(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A recipe, built tiny, or the folder of a run or a saved model.")],
    keywords: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Keywords of the recipe, such as norm_order=post."),
    ] = None,
    *,
    length: Annotated[
        int | None, typer.Option(help="Tokens in each sequence; by default 48, and up to 512 in tests of causality.")
    ] = None,
    only: Annotated[str | None, typer.Option(help="Only these contracts, separated by commas.")] = None,
    skip: Annotated[str | None, typer.Option(help="All but these contracts, separated by commas.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights and inputs.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Test a model's contracts: causality, caching, padding, packing, gradients, precision, saving and more.

    Ends with exit code 1 if a contract fails. Contracts that a recipe does not promise are listed with the reason.
    """
    from manyformer.cli.console import print_result, status_line
    from manyformer.cli.model_arguments import is_folder, read_keywords
    from manyformer.cli.split_arguments import suggest_options
    from manyformer.recipes import get_recipe

    arguments = keywords or []
    model_keywords = (
        {}
        if is_folder(name)
        else suggest_options(context, arguments, lambda: read_keywords(get_recipe(name), arguments))
    )
    if is_folder(name) and arguments:
        from manyformer.errors import UserError

        raise UserError(f"'{arguments[0]}' is for a recipe; the model in {name} is built already")
    from manyformer.check import check as run

    with status_line(f"checking {name}") as status:
        report = run(
            name,
            length=length,
            seed=seed,
            only=None if only is None else _split_commas(only),
            skip=() if skip is None else _split_commas(skip),
            keywords=model_keywords or None,
            on_row=lambda row: status(f"checking {name}: {row.contract} {row.verdict}"),
        )
    if as_json:
        print_result(report.to_json())
    else:
        _print(report)
    if not report.ok:
        raise typer.Exit(DEFECT)


def _split_commas(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _print(report: object) -> None:
    import sys

    from manyformer.check import CheckReport

    assert isinstance(report, CheckReport)
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(report.rich())
    else:
        print(report.table())
