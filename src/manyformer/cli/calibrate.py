"""`manyformer calibrate`: a confidence threshold with a statistical guarantee for an early-exit model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from manyformer.cli.app import JUDGE, command
from manyformer.cli.console import print_json, print_result, print_table, status_line
from manyformer.cli.decoding_arguments import decoding_option
from manyformer.cli.model_arguments import model_folder, resolve_device
from manyformer.cli.shared_options import BatchOption, DeviceOption, JsonOption, PromptCountOption, PromptSplitOption

if TYPE_CHECKING:
    from manyformer.exits import ThresholdCalibration


@command(
    JUDGE,
    "manyformer calibrate runs/calm --tolerance 0.05 --confidence 0.95",
    "manyformer calibrate runs/calm --tolerance 0.02 --risk quality --prompts 1000 --out runs/calm-sure",
    "manyformer translate runs/calm/calibrated --beam 1 --input test.en",
)
def calibrate(
    run: Annotated[str, Argument(help="The folder of a run of an early-exit model.")],
    *,
    tolerance: Annotated[float, Option(help="The largest tolerated expected loss of a text, from 0 to 1.")],
    confidence: Annotated[float, Option(help="The probability with which the guarantee holds.")] = 0.95,
    risk: Annotated[
        Literal["consistency", "quality"],
        Option(help="The loss: distance from the full model's output, or lower quality against references."),
    ] = "consistency",
    measure: Annotated[Literal["rouge-l", "token-f1"], Option(help="The similarity measure of texts.")] = "rouge-l",
    split: PromptSplitOption = "valid",
    prompts: PromptCountOption = 500,
    max_new: Annotated[int | None, decoding_option("max_new")] = None,
    batch: BatchOption = 32,
    out: Annotated[str | None, Option(help="The folder of the calibrated model; RUN/calibrated unless given.")] = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find the lowest exit threshold certified to keep generated texts near the full model's (Schuster et al. 2022).

    Thresholds are tested from the highest down, each by generating for all prompts, until one fails; the last that
    passed is saved in a copy of the model, with calibration.json. If none passes, nothing is saved.
    """
    from manyformer.exits import calibrate as certify
    from manyformer.exits import load_prompts
    from manyformer.exits.save_calibrated import save_calibrated

    folder, model_dir, device = Path(out or f"{run}/calibrated"), model_folder(run), resolve_device(device)
    workload, references = load_prompts(run, split=split, count=prompts, max_new=max_new, rows=batch, device=device)
    with status_line(f"calibrating {run}") as status:
        calibration = certify(
            workload,
            tolerance=tolerance,
            confidence=confidence,
            risk=risk,
            measure=measure,
            references=references,
            on_test=lambda test: status(f"{run}: threshold {test.threshold:g}, mean loss {test.risk:.4f}"),
        )
    save_calibrated(workload.model, calibration, model_dir, folder)
    _print(calibration, folder, as_json=as_json)


def _print(calibration: "ThresholdCalibration", folder: Path, *, as_json: bool) -> None:
    if as_json:
        print_json({**calibration.as_json(), "out": str(folder)})
        return
    rows = [
        (f"{threshold:g}", f"{risk:.4f}", f"{p_value:.3g}", "certified" if certified else "not certified")
        for threshold, risk, p_value, certified in calibration.tested
    ]
    print_table(("threshold", "mean loss", "p-value", ""), rows, right=(0, 1, 2))
    print_result(calibration.statement)
    print_result(f"wrote {folder}")
