"""`manyformer prune`: remove attention heads of a trained run."""

from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from manyformer.cli.app import USE, command
from manyformer.cli.console import Output, PageTable, print_note, status_line
from manyformer.cli.model_arguments import resolve_device
from manyformer.cli.shared_options import DeviceOption, JsonOption, NewFolderOption, RunFolderArgument
from manyformer.errors import UserError

if TYPE_CHECKING:
    from manyformer.pruning import HeadRanking
    from manyformer.train.events import EventListener


@command(
    USE,
    "manyformer prune runs/translate-multi30k --keep 12 --part encoder --how gates --out runs/twelve-heads",
    "manyformer prune runs/lm-stdlib --keep 6 --how importance --out runs/six-heads",
    "manyformer evaluate runs/six-heads",
    "manyformer train runs/six-heads/run.yaml limits.steps=200",
)
def prune(
    run: RunFolderArgument,
    *,
    keep: Annotated[int, Option(min=0, help="Number of heads that remain, in all layers or those of --part.")],
    how: Annotated[
        Literal["gates", "importance"],
        Option(help="Train gates (Voita et al. 2019), or rank heads by gradients of gates (Michel et al. 2019)."),
    ],
    out: NewFolderOption,
    part: Annotated[str | None, Option(help="Layers whose names begin so, such as encoder; all unless given.")] = None,
    penalty: Annotated[float | None, Option(help="--how gates: the penalty lambda on open gates, 0.1.")] = None,
    steps: Annotated[int | None, Option(min=1, help="--how gates: training steps; a fifth of the run's.")] = None,
    learning_rate: Annotated[float | None, Option(help="--how gates: the peak learning rate, 3e-4.")] = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> Output:
    """Remove attention heads of a trained run, with their weights, and write the model that remains as a new run.

    The least important tenth of the heads goes at a time, and the model is scored on the validation data after each
    step: the scores are printed and, with a picture, in the new folder. What remains is a run like any other: it can be
    scored, checked, used and, with its run file, trained on. The same command continues an interrupted training of
    gates."""
    from manyformer.pruning import prune_run
    from manyformer.train import silent

    ranking = _ranking(how, penalty, steps, learning_rate, silent if as_json else None)
    with status_line(f"pruning {run}") as status:
        result = prune_run(
            run,
            ranking,
            keep=keep,
            out=out,
            part=part,
            device=resolve_device(device),
            on_point=lambda point: status(f"pruning {run}: {point.heads} heads"),
            log=print_note,
        )
    names = list(result.curve.points[0].scores)
    rows = [(str(point.heads), *(f"{point.scores[name]:.4f}" for name in names)) for point in result.curve.points]
    table = PageTable(("heads", *(name.replace("_", " ") for name in names)), rows, right=range(len(names) + 1))
    value = {"out": out, "removed": result.removed, **result.curve.model_dump(mode="json")}
    return Output(value, [table, f"removed {result.curve.points[-1].removed}", f"wrote {out}"])


def _ranking(
    how: str,
    penalty: float | None,
    steps: int | None,
    learning_rate: float | None,
    on_event: "EventListener | None",
) -> "HeadRanking":
    """The ranking that the options describe. Raises UserError for options of the other one."""
    from manyformer.pruning import GateRanking, ImportanceRanking

    options = {"--penalty": penalty, "--steps": steps, "--learning-rate": learning_rate}
    if how == "importance":
        if given := [name for name, value in options.items() if value is not None]:
            raise UserError(f"{given[0]} ({options[given[0]]}) is for --how gates; importance trains nothing")
        return ImportanceRanking()
    for name in ("--penalty", "--learning-rate"):
        if (value := options[name]) is not None and not 0 < value < float("inf"):
            raise UserError(f"{name} ({value}) must be above 0")
    return GateRanking(penalty or 0.1, learning_rate or 3e-4, steps, on_event)
