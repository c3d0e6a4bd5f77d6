"""`manyformer calibrate`: a threshold of confidence with a guarantee, for a model that tokens leave early."""

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from manyformer.cli.app import JUDGE, app, examples

if TYPE_CHECKING:
    from manyformer.exits.learn_then_test import ThresholdTest


@app.command(
    "calibrate",
    rich_help_panel=JUDGE,
    epilog=examples(
        "manyformer calibrate runs/calm --tolerance 0.05 --confidence 0.95",
        "manyformer calibrate runs/calm --tolerance 0.02 --risk quality --prompts 1000 --out runs/calm-sure",
        "manyformer translate runs/calm/calibrated --beam 1 --input test.en",
    ),
)
def calibrate(
    run: Annotated[str, typer.Argument(help="The folder of a run whose model tokens leave early.")],
    *,
    tolerance: Annotated[float, typer.Option(help="The largest expected loss of a text, from 0 to 1.")],
    confidence: Annotated[float, typer.Option(help="With what chance the guarantee is to hold.")] = 0.95,
    risk: Annotated[
        Literal["consistency", "quality"],
        typer.Option(help="Distance from what the full model writes, or what is lost against the references."),
    ] = "consistency",
    measure: Annotated[Literal["rouge-l", "token-f1"], typer.Option(help="Of how texts are alike.")] = "rouge-l",
    split: Annotated[
        Literal["valid", "test"], typer.Option(help="The held-out data that prompts come from.")
    ] = "valid",
    prompts: Annotated[int, typer.Option(min=1, help="How many prompts are written to.")] = 500,
    max_new: Annotated[int | None, typer.Option(min=1, help="At most this many new tokens.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows that are written together; changes no result.")] = 32,
    out: Annotated[
        str | None, typer.Option(help="The folder of the calibrated model; RUN/calibrated unless given.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU where there is one unless given.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Find the lowest threshold that is certified to keep whole texts near the full model's (Schuster et al. 2022).

    Thresholds are tested from the most careful down, each by writing to all prompts, until one fails; the last that
    passed goes into a copy of the model, with calibration.json beside it. Where none passes, nothing is written.
    """
    from pathlib import Path

    from manyformer.cli.console import print_json, print_result, print_table, status_line
    from manyformer.cli.model_arguments import model_folder, place
    from manyformer.exits import calibrate as find
    from manyformer.exits.prompts_from_run import material
    from manyformer.exits.save_calibrated import save_calibrated

    folder = Path(run) / "calibrated" if out is None else Path(out)
    trained = model_folder(run)
    found_prompts = material(run, split=split, count=prompts, max_new=max_new, rows=batch, device=place(device))
    with status_line(f"calibrating {run}") as status:

        def tell(tested: "ThresholdTest") -> None:
            status(f"{run}: threshold {tested.threshold:g}, mean loss {tested.risk:.4f}")

        found = find(
            found_prompts.task,
            tolerance=tolerance,
            confidence=confidence,
            risk=risk,
            measure=measure,
            references=found_prompts.references,
            each=tell,
        )
    save_calibrated(found_prompts.task.model, found, trained, folder)
    if as_json:
        print_json({**found.as_json(), "out": str(folder)})
        return
    rows = [
        (
            f"{one.threshold:g}",
            f"{one.risk:.4f}",
            f"{one.p_value:.3g}",
            "certified" if one.certified else "not certified",
        )
        for one in found.tested
    ]
    print_table(("threshold", "mean loss", "p-value", ""), rows, right=(0, 1, 2))
    print_result(found.statement)
    print_result(f"wrote {folder}")
