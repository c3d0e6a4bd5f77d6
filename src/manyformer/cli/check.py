"""`manyformer check`: does a model keep its promises?"""

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
    name: Annotated[str, typer.Argument(help="A recipe, built small, or the folder of a run or a saved model.")],
    keywords: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keywords of the recipe, such as norm=post.")
    ] = None,
    *,
    length: Annotated[
        int | None,
        typer.Option(help="Tokens in all sequences; by default 48, and up to 512 where the future may leak."),
    ] = None,
    only: Annotated[str | None, typer.Option(help="Only these contracts, separated by commas.")] = None,
    skip: Annotated[str | None, typer.Option(help="All but these contracts, separated by commas.")] = None,
    seed: Annotated[int, typer.Option(help="Draws weights and inputs.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Hold a model to its promises: no look ahead, cached as uncached, padding, packing, gradients, precision, saving.

    Ends with exit code 1 if a promise is broken. What a recipe does not promise is listed with the reason.
    """
    from manyformer.cli.console import print_result, status_line
    from manyformer.cli.model_arguments import is_folder, read_keywords
    from manyformer.cli.split_arguments import with_options
    from manyformer.recipes import get_recipe

    words = keywords or []
    given = {} if is_folder(name) else with_options(context, words, lambda: read_keywords(get_recipe(name), words))
    if is_folder(name) and words:
        from manyformer.errors import UserError

        raise UserError(f"'{words[0]}' is for a recipe; the model in {name} is built already")
    from manyformer.check import check as run

    with status_line(f"checking {name}") as status:
        report = run(
            name,
            length=length,
            seed=seed,
            only=None if only is None else _listed(only),
            skip=() if skip is None else _listed(skip),
            keywords=given or None,
            each=lambda row: status(f"checking {name}: {row.contract} {row.verdict}"),
        )
    if as_json:
        print_result(report.to_json())
    else:
        _print(report)
    if not report.ok:
        raise typer.Exit(DEFECT)


def _listed(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _print(report: object) -> None:
    import sys

    from manyformer.check import CheckReport

    assert isinstance(report, CheckReport)
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(report.rich())
    else:
        print(report.table())
