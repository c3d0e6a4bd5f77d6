"""The commands whose result is a figure: `plot` of learning curves, `regress` of Nadaraya-Watson regression."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from manyformer.cli.app import JUDGE, command
from manyformer.cli.console import Output, print_result
from manyformer.cli.options import PictureOption, complete_runs


@command(
    JUDGE,
    "manyformer plot runs/lm-stdlib",
    "manyformer plot runs/narrow runs/wide --out widths.svg",
    "manyformer plot runs/lm-stdlib --out column.pdf --width 3.4",
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
    width: Annotated[
        float, Option(min=2.5, max=40, help="Width in inches; below 6.4 the panels stand below each other.")
    ] = 8.4,
) -> None:
    """Plot loss, validation score, learning rate and gradient norm over the steps of one or several runs.

    Also works during a run.
    """
    from manyformer.analysis.figures import plot_runs

    picture = out or (Path(runs[0]) / "curves.png" if len(runs) == 1 else Path("curves.png"))
    plot_runs(runs, picture, width=width)
    print_result(str(picture))


@command(
    JUDGE,
    "manyformer regress --out fit.png",
    "manyformer regress --kernel epanechnikov --points 200 --noise 0.2 --json",
)
def regress(
    *,
    kernel: Annotated[
        Literal["gaussian", "laplace", "epanechnikov"], Option(help="What weights a distance has.")
    ] = "gaussian",
    points: Annotated[int, Option(min=4, max=2000, help="Number of points.")] = 50,
    noise: Annotated[float, Option(min=0, help="Deviation of the noise of each point.")] = 0.5,
    seed: Annotated[int, Option(help="Seed of points and noise.")] = 0,
    out: PictureOption = None,
) -> Output:
    """Nadaraya-Watson regression: attention whose keys are noisy points of a function and whose values are their y.

    Compares four bandwidths: one too small, one too large, the best by leaving out each point in turn, and one learned
    by gradient descent.
    """
    from manyformer.analysis.figures.curves import draw_regression
    from manyformer.nn.kernels.kernel_regression import KernelRegression, noisy_sample

    regression = KernelRegression(kernel, noisy_sample(points, noise, seed))
    searched = regression.search_bandwidth()
    bandwidths = {
        "small": searched / 10,
        "large": searched * 10,
        "leave-one-out": searched,
        "learned": regression.learn_bandwidth(),
    }
    choices = [regression.judge(method, bandwidth) for method, bandwidth in bandwidths.items()]
    rows = [
        f"{choice.method:15s} {choice.bandwidth:7.4f}  {choice.leave_one_out:8.4f}  {choice.error:.4f}"
        for choice in choices
    ]
    page = ["bandwidth           h      left out  error", *rows]
    return Output(choices, page, out, partial(draw_regression, regression, choices))
