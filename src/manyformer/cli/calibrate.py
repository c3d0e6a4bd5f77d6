"""`manyformer calibrate`: a confidence threshold with a statistical guarantee for an early-exit model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from manyformer.cli.app import JUDGE, command
from manyformer.cli.console import print_json, print_result, print_table, status_line
from manyformer.cli.decoding_arguments import decoding_option
from manyformer.cli.model_arguments import data_paths, model_folder, resolve_device
from manyformer.cli.shared_options import BatchOption, DeviceOption, JsonOption
from manyformer.cli.shell_completion import complete_runs

if TYPE_CHECKING:
    from manyformer.exits import ThresholdCalibration


@command(
    JUDGE,
    "manyformer calibrate runs/calm --tolerance 0.05 --confidence 0.95",
    "manyformer calibrate runs/calm --tolerance 0.02 --risk quality --data new.en --data new.de --out quality.json",
    "manyformer translate runs/calm --beam 1 --calibration runs/calm/calibration.json --input test.en",
)
def calibrate(
    run: Annotated[str, Argument(help="The folder of a run of an early-exit model.", autocompletion=complete_runs)],
    *,
    tolerance: Annotated[float, Option(help="The largest tolerated expected loss of a text, from 0 to 1.")],
    confidence: Annotated[float, Option(help="The probability with which the guarantee holds.")] = 0.95,
    risk: Annotated[
        Literal["consistency", "quality"],
        Option(help="The loss: distance from the full model's output, or lower quality against references."),
    ] = "consistency",
    measure: Annotated[Literal["rouge-l", "token-f1"], Option(help="The similarity measure of texts.")] = "rouge-l",
    data: Annotated[
        list[str] | None, Option(help="Texts that the run has not read, or two parallel files; its test data if none.")
    ] = None,
    documents: Annotated[int, Option(min=1, help="At most this many documents, with one prompt from each.")] = 500,
    max_new: Annotated[int | None, decoding_option("max_new")] = None,
    batch: BatchOption = 32,
    out: Annotated[Path | None, Option(help="The file to write; RUN/calibration.json unless given.")] = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find the lowest exit threshold certified to keep generated texts near the full model's (Schuster et al. 2022).

    Thresholds are tested from the highest down, each by generating for all prompts, until one fails; the last that
    passed is written to a file, which `generate`, `translate` and `evaluate` take. If none passes, nothing is written.
    Each document counts once, and none that the run has read counts at all.
    """
    from manyformer.exits import calibrate as certify
    from manyformer.exits import load_calibration_prompts
    from manyformer.exits.learn_then_test import check_levels

    check_levels(tolerance, confidence)
    model_folder(run)
    prompt_set = load_calibration_prompts(
        run, data=data_paths(data), count=documents, max_new=max_new, rows=batch, device=resolve_device(device)
    )
    with status_line(f"calibrating {run}") as status:
        calibration = certify(
            prompt_set.workload,
            tolerance=tolerance,
            confidence=confidence,
            risk=risk,
            measure=measure,
            references=prompt_set.references,
            documents=prompt_set.documents,
            source=prompt_set.source,
            on_test=lambda test: status(f"{run}: threshold {test.threshold:g}, mean loss {test.risk:.4f}"),
        )
    file = out or Path(run) / "calibration.json"
    calibration.write(file)
    _print(calibration, file, as_json=as_json)


def _print(calibration: "ThresholdCalibration", file: Path, *, as_json: bool) -> None:
    if as_json:
        tested = [test._asdict() for test in calibration.tested]
        statement = {"statement": calibration.statement, "out": str(file)}
        print_json({**calibration.model_dump(mode="json"), "tested": tested, **statement})
        return
    rows = [
        (f"{threshold:g}", f"{risk:.4f}", f"{p_value:.3g}", "certified" if certified else "not certified")
        for threshold, risk, p_value, certified in calibration.tested
    ]
    print_table(("threshold", "mean loss", "p-value", ""), rows, right=(0, 1, 2))
    print_result(calibration.statement)
    print_result(f"wrote {file}")
