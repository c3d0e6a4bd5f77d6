"""`manyformer calibrate`: a confidence threshold with a statistical guarantee for an early-exit model."""

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from manyformer.cli.app import JUDGE, DeviceOption, app, examples

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
    run: Annotated[str, typer.Argument(help="The folder of a run of an early-exit model.")],
    *,
    tolerance: Annotated[float, typer.Option(help="The largest tolerated expected loss of a text, from 0 to 1.")],
    confidence: Annotated[float, typer.Option(help="The probability with which the guarantee holds.")] = 0.95,
    risk: Annotated[
        Literal["consistency", "quality"],
        typer.Option(help="The loss: distance from the full model's output, or lower quality against references."),
    ] = "consistency",
    measure: Annotated[
        Literal["rouge-l", "token-f1"], typer.Option(help="The similarity measure of texts.")
    ] = "rouge-l",
    split: Annotated[
        Literal["valid", "test"], typer.Option(help="The held-out data that prompts come from.")
    ] = "valid",
    prompts: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 500,
    max_new: Annotated[int | None, typer.Option(min=1, help="At most this many new tokens.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Batch size of generation; does not change results.")] = 32,
    out: Annotated[
        str | None, typer.Option(help="The folder of the calibrated model; RUN/calibrated unless given.")
    ] = None,
    device: DeviceOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Find the lowest exit threshold certified to keep generated texts near the full model's (Schuster et al. 2022).

    Thresholds are tested from the highest down, each by generating for all prompts, until one fails; the last that
    passed is saved in a copy of the model, with calibration.json. If none passes, nothing is saved.
    """
    from pathlib import Path

    from manyformer.cli.console import print_json, print_result, print_table, status_line
    from manyformer.cli.model_arguments import model_folder, resolve_device
    from manyformer.exits import calibrate as find
    from manyformer.exits.prompts_from_run import load_prompts
    from manyformer.exits.save_calibrated import save_calibrated

    folder = Path(run) / "calibrated" if out is None else Path(out)
    model_dir = model_folder(run)
    prompt_set = load_prompts(
        run, split=split, count=prompts, max_new=max_new, rows=batch, device=resolve_device(device)
    )
    with status_line(f"calibrating {run}") as status:

        def tell(tested: "ThresholdTest") -> None:
            status(f"{run}: threshold {tested.threshold:g}, mean loss {tested.risk:.4f}")

        calibration = find(
            prompt_set.workload,
            tolerance=tolerance,
            confidence=confidence,
            risk=risk,
            measure=measure,
            references=prompt_set.references,
            on_test=tell,
        )
    save_calibrated(prompt_set.workload.model, calibration, model_dir, folder)
    if as_json:
        print_json({**calibration.as_json(), "out": str(folder)})
        return
    rows = [
        (
            f"{test.threshold:g}",
            f"{test.risk:.4f}",
            f"{test.p_value:.3g}",
            "certified" if test.certified else "not certified",
        )
        for test in calibration.tested
    ]
    print_table(("threshold", "mean loss", "p-value", ""), rows, right=(0, 1, 2))
    print_result(calibration.statement)
    print_result(f"wrote {folder}")
