"""`manyformer evaluate`: score a trained model."""

import math
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from manyformer.cli.app import JUDGE, command
from manyformer.cli.console import print_json, print_result, print_table, status_line
from manyformer.cli.decoding_arguments import decoding_option
from manyformer.cli.model_arguments import changed_keywords, data_paths, resolve_device, use_calibrated_exits
from manyformer.cli.shared_options import CalibrationOption, DeviceOption, JsonOption, TokenizeOption
from manyformer.errors import UserError

if TYPE_CHECKING:
    from manyformer.evaluate import EvaluationSettings
    from manyformer.models import Model


@command(
    JUDGE,
    "manyformer evaluate runs/lm-stdlib",
    "manyformer evaluate runs/lm-stdlib --data other.txt",
    "manyformer evaluate runs/reformer num_hashes=8",
    "manyformer evaluate runs/rl-graph-walks --wanted=-10,-5,-3",
    "manyformer evaluate runs/translate-multi30k --data test.en --data test.de --beam 8 --tokenize none --json",
)
def evaluate(
    run: Annotated[str, Argument(help="The folder of a run.")],
    keywords: Annotated[
        list[str] | None,
        Argument(metavar="[KEY=VALUE]...", help="Keywords that change no weights, such as num_hashes=8."),
    ] = None,
    *,
    split: Annotated[str | None, Option(help="test or valid of the run's data; test if there is one.")] = None,
    data: Annotated[list[str] | None, Option(help="A file to score instead; two parallel files, source first.")] = None,
    beam: Annotated[int, decoding_option("beam")] = 4,
    length_penalty: Annotated[float, decoding_option("length_penalty")] = 0.6,
    tokenize: TokenizeOption = None,
    lowercase: Annotated[bool, Option("--lowercase", help="BLEU: compare without upper case.")] = False,
    wanted: Annotated[
        str | None, Option(help="Decision Transformers: the returns to ask for, such as 100,200,500.")
    ] = None,
    environment: Annotated[str | None, Option(help="Decision Transformers: where, if not in the run's own.")] = None,
    calibration: CalibrationOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Score a trained model on held-out data with the scores of its task.

    Language models: perplexity, bits per character and byte. Translations: BLEU, chrF and TER with sacrebleu's
    signatures, exact matches. Classifiers: accuracy and F1. Each score says how it was computed.
    """
    from manyformer.evaluate import EvaluationSettings
    from manyformer.evaluate import evaluate as score

    changed = changed_keywords(run, keywords or [])
    if calibration is not None and "threshold" in changed:
        raise UserError(f"threshold={changed['threshold']} contradicts --calibration, which sets the threshold")
    settings = EvaluationSettings(
        beam=beam,
        length_penalty=length_penalty,
        tokenize=tokenize,
        lowercase=lowercase,
        wanted=wanted_returns(wanted),
        environment=environment,
    )
    with status_line(f"scoring {run}") as status:
        evaluation = score(
            run,
            split=split,
            data=data_paths(data),
            settings=settings,
            keywords=changed,
            device=resolve_device(device),
            wrap=partial(_calibrated, calibration=calibration, settings=settings),
            on_progress=lambda share: status(f"scoring {run}: {share:.0%}"),
        )
    if as_json:
        print_json({"run": run, **asdict(evaluation)})
        return
    print_result(f"{run} on {evaluation.data}: {evaluation.how}")
    rows = [(score.name, f"{score.value:.{score.digits}f}", score.signature) for score in evaluation.scores]
    print_table(("score", "value", "how"), rows, right=(1,))


def wanted_returns(text: str | None) -> tuple[float, ...]:
    """The numbers of --wanted. Raises UserError for others."""
    try:
        returns = tuple(map(float, text.split(","))) if text is not None else ()
    except ValueError:
        returns = (math.nan,)
    if not all(map(math.isfinite, returns)):
        raise UserError(f"--wanted ({text}) must be numbers with commas between them, such as 100,200,500")
    return returns


def _calibrated(model: "Model", calibration: Path | None, settings: "EvaluationSettings") -> "Model":
    """The model to score: with calibrated exits if there is a calibration, which must hold for the settings."""
    if calibration is None:
        return model
    from manyformer.generate import decoding_from_options
    from manyformer.recipes.registry import task_of

    if not task_of(model).takes_source:
        raise UserError(
            f"{calibration} holds for generated texts, and the scores of a language model generate none; `manyformer "
            "thresholds` compares its texts"
        )
    decoding = decoding_from_options(beam=settings.beam, length_penalty=settings.length_penalty)
    use_calibrated_exits(model, calibration, decoding)
    return model
