"""`manyformer floors`: the accuracy of guesses on a generated task, below which a score shows nothing."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

from typer import Argument, Option

from manyformer.cli.app import JUDGE, command
from manyformer.cli.console import Output, PageTable
from manyformer.cli.split_arguments import split_arguments
from manyformer.errors import UserError, suggest_names

if TYPE_CHECKING:
    from manyformer.config import SyntheticData


@command(
    JUDGE,
    "manyformer floors                                     the rules of generated tasks",
    "manyformer floors listops --examples 10000",
    "manyformer floors mqar symbols=64 pairs=8",
    "manyformer floors mine.yaml data.length=256           the data of a run",
    accepts_settings=True,
)
def floors(
    arguments: Annotated[
        list[str] | None,
        Argument(
            metavar="[RULE-OR-RUN] [KEY=VALUE]...",
            help="A rule, or a run file, a shipped run or a run's folder whose data a rule generates; then settings.",
            show_default=False,
        ),
    ] = None,
    *,
    examples: Annotated[int, Option(min=4, help="Number of generated examples, half of which are scored.")] = 2_000,
) -> Output:
    """Measure what guesses without a model score on a generated task.

    These are chance, the most frequent answer, n-grams, the last follower in the row, the nearest neighbour, and
    shortcuts such as the root operator of ListOps.
    """
    from manyformer.data.synthetic_floors import measure_floors

    target, settings = split_arguments(arguments or [])
    if target is None:
        if settings:
            raise UserError(f"floors needs the rule or the run that {settings[0]} is a setting of")
        return _rules()
    data = _read(target, settings)
    measured = measure_floors(data, examples)
    title = f"{data.rule}: accuracy of guesses in %, on {measured[0].targets:,} targets"
    rows = [(floor.name, f"{floor.accuracy:.1f}", f"{floor.standard_error:.1f}") for floor in measured]
    return Output(measured, [title, PageTable(("guess", "accuracy", "+-"), rows, right=(1, 2))])


def _read(target: str, settings: list[str]) -> "SyntheticData":
    from manyformer.config import SyntheticData, load_run, shipped_runs
    from manyformer.recipes import recipe_names
    from manyformer.train.run_folder import recipe_lookup

    recipes = recipe_lookup()  # imports the rules of installed packages
    if target in SyntheticData.variants:
        in_data = [_in_data(setting) for setting in settings]
        run = load_run("transformer-lm", ["data.kind=synthetic", f"data.rule={target}", *in_data], recipes=recipes)
    elif target not in {*shipped_runs(), *recipe_names()} and not Path(target).exists():
        suggestion = suggest_names(target, [*SyntheticData.variants, *shipped_runs()])
        raise UserError(f"there is no rule, run file or shipped run '{target}'; {suggestion}")
    else:
        run = load_run(target, settings, recipes=recipes)
    if run.data.kind != "synthetic":
        raise UserError(
            f"{target} learns from data of kind {run.data.kind}; floors are those of generated data (kind synthetic)"
        )
    return cast("SyntheticData", run.data)


def _in_data(setting: str) -> str:
    """The setting as one of the data: `data.pairs=8` for `pairs=8` and for `--pairs`."""
    dashes, name = ("--", setting[2:]) if setting.startswith("--") else ("", setting)
    is_value = "=" not in name and not dashes
    if is_value or name.partition("=")[0].startswith("data."):
        return setting
    return f"{dashes}data.{name}"


def _rules() -> Output:
    from manyformer.config import SyntheticData

    rules = {name: " ".join((section.__doc__ or "").split()) for name, section in SyntheticData.variants.items()}
    return Output(rules, [PageTable(("rule", "what it generates"), rules.items())])
