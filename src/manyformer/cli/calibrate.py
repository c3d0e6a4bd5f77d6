"""`manyformer calibrate`: exit thresholds, certified or measured, and the computation for each token of a text."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from manyformer.base.errors import UserError
from manyformer.cli.app import JUDGE, command
from manyformer.cli.console import Output, PageTable, print_note, status_line
from manyformer.cli.model_arguments import data_paths, load_model, model_folder, resolve_device
from manyformer.cli.options import (
    AnswerOption,
    BatchOption,
    DeviceOption,
    PictureOption,
    RunArgument,
    complete_runs,
    decoding_option,
    refuse_options,
)

if TYPE_CHECKING:
    from manyformer.inference.early_exit import ThresholdPoint

CERTIFY = "With --tolerance"
CertifyOption = partial(Option, rich_help_panel=CERTIFY)
SweepOption = partial(Option, rich_help_panel="With --sweep")

OPTIONS_OF = {
    "--tolerance": ("confidence", "risk", "measure", "data", "documents", "max_new"),
    "--sweep": ("values", "draws", "seed", "split", "prompts", "rounds", "tokenize"),
    "--text": ("answer",),
}
"""The three ways to use the command, with the options that are for one of them alone."""


@command(
    JUDGE,
    "manyformer calibrate runs/calm --tolerance 0.05 --confidence 0.95",
    "manyformer calibrate runs/calm --tolerance 0.02 --risk quality --data new.en --data new.de --out quality.json",
    "manyformer translate runs/calm --beam 1 --calibration runs/calm/calibration.json --input test.en",
    "manyformer calibrate runs/calm --sweep",
    "manyformer calibrate runs/calm runs/depth-adaptive --sweep --values 0.9 --values 0.5 --out sweep --rounds 3",
    "manyformer calibrate runs/depth-adaptive --sweep --draws 50",
    'manyformer calibrate runs/universal --text "two men are sitting on a bench ." --out steps.png',
    'manyformer calibrate runs/universal --text "a dog runs ." --answer "ein hund rennt ." --json',
)
def calibrate(
    context: typer.Context,
    runs: Annotated[
        list[str], Argument(help="The folder of a run; several with --sweep.", autocompletion=complete_runs)
    ],
    *,
    tolerance: Annotated[
        float | None,
        Option(help="Certify a threshold: the largest tolerated expected loss of a text, from 0 to 1."),
    ] = None,
    sweep: Annotated[bool, Option("--sweep", help="Measure a range of thresholds instead.")] = False,
    text: Annotated[str | None, Option(help="Count the computation for each token of this text instead.")] = None,
    confidence: Annotated[float, CertifyOption(help="The probability with which the guarantee holds.")] = 0.95,
    risk: Annotated[
        Literal["consistency", "quality"],
        CertifyOption(help="The loss: distance from the full model's output, or lower quality against references."),
    ] = "consistency",
    measure: Annotated[Literal["rouge-l", "token-f1"], CertifyOption(help="The similarity measure of texts.")] = (
        "rouge-l"
    ),
    data: Annotated[
        list[str] | None,
        CertifyOption(help="Texts that the run has not read, or two parallel files; its test data if none."),
    ] = None,
    documents: Annotated[
        int, CertifyOption(min=1, help="At most this many documents, with one prompt from each.")
    ] = 500,
    max_new: Annotated[int | None, decoding_option("max_new", panel=CERTIFY)] = None,
    values: Annotated[list[float] | None, SweepOption(help="A threshold for all layers; may be given again.")] = None,
    draws: Annotated[
        int | None, SweepOption(min=1, help="Random threshold vectors; the best of each cost remain.")
    ] = None,
    seed: Annotated[int, SweepOption(min=0, help="Seed of the random thresholds.")] = 0,
    split: Annotated[Literal["valid", "test"], SweepOption(help="The held-out data that prompts come from.")] = "valid",
    prompts: Annotated[int, SweepOption(min=1, help="Number of prompts.")] = 200,
    rounds: Annotated[int, SweepOption(min=1, help="How many times each measurement is repeated, in turns.")] = 1,
    tokenize: Annotated[
        str | None,
        SweepOption(help="BLEU: sacrebleu's tokenizer, 13a unless given; none for text that is tokenized."),
    ] = None,
    answer: Annotated[
        str | None,
        Option(
            help="The target of an encoder-decoder; its own translation unless given.", rich_help_panel="With --text"
        ),
    ] = None,
    batch: BatchOption = 32,
    out: Annotated[
        Path | None,
        Option(
            help="The file of the certified threshold, RUN/calibration.json unless given; with --sweep the folder of "
            "the table and the picture, thresholds unless given; with --text a picture: .png, .svg or .pdf."
        ),
    ] = None,
    device: DeviceOption = None,
) -> Output:
    """Early exits: certify a threshold, measure a range of them, or count the computation for each token of a text.

    With --tolerance: find the lowest exit threshold certified to keep generated texts near the full model's (Schuster
    et al. 2022). Thresholds are tested from the highest down, each by generating for all prompts, until one fails; the
    last that passed is written to a file, which `generate`, `translate` and `evaluate` take. If none passes, nothing is
    written. Each document counts once, and none that the run has read counts at all.

    With --sweep: quality, layers and speed of models on held-out data for a range of exit thresholds. Translations are
    scored by BLEU, all texts by their similarity to the full model's. A rule without a threshold is measured as it was
    trained.

    With --text: the steps until each token halts, or the layer at which it exits. For adaptive computation time the
    picture shows the halting probabilities of each step.
    """
    modes = {"--tolerance": tolerance is not None, "--sweep": sweep, "--text": text is not None}
    chosen = [option for option, is_chosen in modes.items() if is_chosen]
    if len(chosen) != 1:
        raise UserError(
            "calibrate certifies a threshold (--tolerance 0.05), measures a range of them (--sweep), or counts the "
            "computation for each token of a text (--text TEXT): give one of these options"
        )
    for option, names in OPTIONS_OF.items():
        if option not in chosen:
            refuse_options(context, names, f"{{option}} is for {option}: leave it out")
    if sweep:
        if values and draws:
            raise UserError("give either --values or --draws, not both")
        held_out = {"split": split, "count": prompts, "rows": batch}
        points = _sweep(runs, values, draws, seed, held_out, device, tokenize=tokenize, rounds=rounds)
        return _sweep_output(points, out or Path("thresholds"))
    if len(runs) > 1:
        raise UserError(f"{chosen[0]} is for one run, and these are {len(runs)}: {', '.join(runs)}")
    if text is not None:
        refuse_options(context, ("batch",), "{option} is for generated texts: leave it out with --text")
        return _token_work(runs[0], text, answer, out, device)
    test = {"tolerance": tolerance, "confidence": confidence, "risk": risk, "measure": measure}
    texts = {"data": data_paths(data), "count": documents, "max_new": max_new, "rows": batch}
    return _certify(runs[0], test, texts, out or Path(runs[0]) / "calibration.json", device)


def _certify(run: str, test: dict[str, Any], texts: dict[str, Any], file: Path, device: str | None) -> Output:
    """The lowest threshold that passes the test on these texts, which is written to the file."""
    from manyformer.inference.early_exit import calibrate as certify
    from manyformer.inference.early_exit import load_calibration_prompts
    from manyformer.inference.early_exit.calibration import check_levels

    # before the model is loaded and its data read
    check_levels(test["tolerance"], test["confidence"])
    model_folder(run)
    prompts = load_calibration_prompts(run, device=resolve_device(device), **texts)
    with status_line(f"calibrating {run}") as status:
        calibration = certify(
            prompts.workload,
            references=prompts.references,
            documents=prompts.documents,
            source=prompts.source,
            on_test=lambda test: status(f"{run}: threshold {test.threshold:g}, mean loss {test.risk:.4f}"),
            **test,
        )
    calibration.write(file)
    verdicts = {True: "certified", False: "not certified"}
    rows = [
        (f"{test.threshold:g}", f"{test.risk:.4f}", f"{test.p_value:.3g}", verdicts[test.certified])
        for test in calibration.tested
    ]
    table = PageTable(("threshold", "mean loss", "p-value", ""), rows, right=(0, 1, 2))
    facts = {"tested": calibration.tested, "statement": calibration.statement, "out": file}
    return Output({**calibration.model_dump(mode="json"), **facts}, [table, calibration.statement, f"wrote {file}"])


def _sweep(
    runs: list[str],
    values: list[float] | None,
    draws: int | None,
    seed: int,
    held_out: dict[str, Any],
    device: str | None,
    *,
    tokenize: str | None,
    rounds: int,
) -> "list[ThresholdPoint]":
    """The results of each run under the given thresholds, or under the best of random ones."""
    from manyformer.inference.early_exit import ThresholdPoint, load_prompts, sweep
    from manyformer.inference.early_exit.early_decoding import early_exit_stack
    from manyformer.inference.early_exit.sweep import DEFAULT_THRESHOLDS, best_in_bins, random_thresholds

    points: list[ThresholdPoint] = []
    with status_line(f"generating with {len(runs)} models") as status:
        for run in runs:
            model_folder(run)
            prompts = load_prompts(run, device=resolve_device(device), **held_out)
            depth = early_exit_stack(prompts.workload.model).depth
            points_of_run = sweep(
                Path(run).name,
                prompts,
                values or DEFAULT_THRESHOLDS if draws is None else random_thresholds(depth, draws, seed),
                tokenize=tokenize,
                rounds=rounds,
                on_point=lambda point: status(f"{point.model}: threshold {point.label}, {point.layers:.2f} layers"),
            )
            # the full model comes first, and stays beside the best of each cost
            points += points_of_run if draws is None else [points_of_run[0], *best_in_bins(points_of_run[1:])]
    return points


def _sweep_output(points: "list[ThresholdPoint]", folder: Path) -> Output:
    """The results of a sweep, which are written to the folder."""
    from manyformer.inference.early_exit.sweep import TABLE_HEADER, table_rows, write_points

    files = write_points(points, folder)
    table = PageTable(TABLE_HEADER, table_rows(points), right=(2, 3, 4, 5, 6))
    return Output(points, [table, f"wrote {', '.join(map(str, files))}"])


def _token_work(run: str, text: str, answer: str | None, picture: Path | None, device: str | None) -> Output:
    """The computation for each token of a text."""
    from manyformer.analysis.figures.token_work import describe_counts, draw_counts, token_work

    counts = token_work(load_model(run, device), text, answer)
    page = [
        f"{count.title}, mean {count.mean:.2f} of at most {count.maximum:g}\n{describe_counts(count)}\n"
        for count in counts
    ]
    value = [{**count._asdict(), "mean": count.mean} for count in counts]
    return Output(value, page, picture, partial(draw_counts, counts))


# the name of version 0.2, which goes in 0.4 with EARLIER_FORMS
@command(None, name="efforts", hidden=True)
def _efforts(
    run: RunArgument,
    text: Annotated[str, Argument(help="The input text.")],
    *,
    answer: AnswerOption = None,
    out: PictureOption = None,
    device: DeviceOption = None,
) -> Output:
    """Now `manyformer calibrate RUN --text TEXT`."""
    print_note("`manyformer efforts RUN TEXT` is now `manyformer calibrate RUN --text TEXT`")
    return _token_work(run, text, answer, out, device)
