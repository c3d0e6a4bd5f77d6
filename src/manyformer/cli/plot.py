"""`manyformer plot`: plot the learning curves of runs."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from manyformer.cli.app import JUDGE, command
from manyformer.cli.console import print_result
from manyformer.cli.shell_completion import complete_runs


@command(
    JUDGE,
    "manyformer plot runs/lm-stdlib",
    "manyformer plot runs/narrow runs/wide --out widths.svg",
)
def plot(
    runs: Annotated[
        list[str], Argument(help="Folders of runs; several are plotted in one picture.", autocompletion=complete_runs)
    ],
    *,
    out: Annotated[
        Path | None,
        Option(help="The picture (.png, .svg or .pdf): RUN/curves.png, or curves.png here for several runs."),
    ] = None,
) -> None:
    """Plot loss, validation score, learning rate and gradient norm over the steps of one or several runs.

    Also works during a run.
    """
    from manyformer.view import plot_runs

    picture = out or (Path(runs[0]) / "curves.png" if len(runs) == 1 else Path("curves.png"))
    plot_runs(runs, picture)
    print_result(str(picture))
