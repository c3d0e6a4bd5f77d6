"""`manyformer evaluate`: score a trained model; `baselines`: what guesses without a model score on a generated task."""

import math
import re
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from typer import Argument, Option

from manyformer.base.context_windows import ContextWindows
from manyformer.base.errors import UserError, suggest_names
from manyformer.cli.app import JUDGE, command
from manyformer.cli.console import Block, Note, Output, PageTable, json_form, print_note, status_line
from manyformer.cli.model_arguments import changed_keywords, data_paths, resolve_device, use_calibrated_exits
from manyformer.cli.options import (
    CalibrationOption,
    ContextOption,
    DeviceOption,
    RunFolderArgument,
    StrideOption,
    TokenizeOption,
    decoding_option,
    split_arguments,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from manyformer.config import SyntheticData
    from manyformer.inference.evaluate import Evaluation, EvaluationSettings
    from manyformer.models import Model


SACREBLEU = re.compile(r"\bversion:")
"""What every signature of sacrebleu has."""


@command(
    JUDGE,
    "manyformer evaluate runs/lm-stdlib",
    "manyformer evaluate runs/lm-stdlib --data other.txt",
    "manyformer evaluate runs/lm-stdlib --context 256 --stride 32",
    "manyformer evaluate runs/reformer num_hashes=8",
    "manyformer evaluate runs/rl-graph-walks --wanted=-10,-5,-3",
    "manyformer evaluate runs/with-attention --lengths 10,20,30 --beside runs/without --out lengths.png",
    "manyformer evaluate runs/translate-multi30k --data test.en --data test.de --beam 8 --tokenize none --json",
)
def evaluate(
    run: RunFolderArgument,
    keywords: Annotated[
        list[str] | None,
        Argument(metavar="[KEY=VALUE]...", help="Keywords that change no weights, such as num_hashes=8."),
    ] = None,
    *,
    split: Annotated[str | None, Option(help="test or valid of the run's data; test if there is one.")] = None,
    data: Annotated[list[str] | None, Option(help="A file to score instead; two parallel files, source first.")] = None,
    context: ContextOption = None,
    stride: StrideOption = None,
    beam: Annotated[int, decoding_option("beam")] = 4,
    length_penalty: Annotated[float, decoding_option("length_penalty")] = 0.6,
    tokenize: TokenizeOption = None,
    lowercase: Annotated[bool, Option("--lowercase", help="BLEU: compare without upper case.")] = False,
    lengths: Annotated[
        str | None, Option(help="Translations: BLEU also by source words, in ranges up to these, such as 10,20,30.")
    ] = None,
    beside: Annotated[list[str] | None, Option(help="With --lengths: another run, scored and drawn alike.")] = None,
    out: Annotated[Path | None, Option(help="With --lengths: draw BLEU by length, .png, .svg or .pdf.")] = None,
    wanted: Annotated[
        str | None, Option(help="Decision Transformers: the returns to ask for, such as 100,200,500.")
    ] = None,
    environment: Annotated[str | None, Option(help="Decision Transformers: where, if not in the run's own.")] = None,
    calibration: CalibrationOption = None,
    device: DeviceOption = None,
) -> Output:
    """Score a trained model on held-out data with the scores of its task.

    Language models: perplexity, bits per character and byte; with --context every scored token has that many tokens
    before it, less the stride, if its document has them. Translations: BLEU, chrF and TER with sacrebleu's
    signatures, exact matches. Classifiers: accuracy and F1. Each score says how it was computed.
    """
    from manyformer.inference.evaluate import EvaluationSettings
    from manyformer.inference.evaluate import evaluate as score

    changed = changed_keywords(run, keywords)
    # either would replace the other in silence
    if calibration is not None and "threshold" in changed:
        raise UserError(f"threshold={changed['threshold']} contradicts --calibration, which sets the threshold")
    settings = EvaluationSettings(
        beam=beam,
        length_penalty=length_penalty,
        tokenize=tokenize,
        lowercase=lowercase,
        lengths=source_lengths(lengths, beside, out),
        wanted=wanted_returns(wanted),
        environment=environment,
    )
    windows = ContextWindows.of(context, stride)

    def score_run(name: str) -> "Evaluation":
        # runs beside it are scored as they are: keywords and the calibration are those of the first
        is_first = name == run
        with status_line(f"scoring {name}") as status:
            return score(
                name,
                split=split,
                data=data_paths(data),
                windows=windows,
                settings=settings,
                keywords=changed if is_first else {},
                device=resolve_device(device),
                wrap=partial(_calibrated, calibration=calibration if is_first else None, settings=settings),
                on_progress=lambda share: status(f"scoring {name}: {share:.0%}"),
                log=print_note,
            )

    evaluations = {name: score_run(name) for name in (run, *(beside or []))}
    if out is not None:
        _draw_by_length(evaluations, out)
    first, *compared = (_evaluation_record(name, evaluation) for name, evaluation in evaluations.items())
    return Output({**first, "beside": compared} if compared else first, _scores_page(evaluations))


def _draw_by_length(evaluations: "dict[str, Evaluation]", out: Path) -> None:
    """Draw the scores of all runs by the number of words of the source."""
    from manyformer.analysis.figures import draw_scores_by_length

    # scores by length have the words of their range among their parts, the others have not
    by_length = {
        name: [record for record in evaluation.scores if "words" in record.parts]
        for name, evaluation in evaluations.items()
    }
    draw_scores_by_length(by_length, out)


def _evaluation_record(run: str, evaluation: "Evaluation") -> dict[str, Any]:
    return {"run": run, **json_form(evaluation)}


def _scores_page(evaluations: "Mapping[str, Evaluation]") -> Iterator[Block]:
    """The scores of each run as a table."""
    for name, evaluation in evaluations.items():
        yield f"{name} on {evaluation.data}: {evaluation.how}"
        rows = [(score.name, f"{score.value:.{score.digits}f}", _how(score.signature)) for score in evaluation.scores]
        yield PageTable(("score", "value", "how"), rows, right=(1,))
        if names := [score.name for score in evaluation.scores if not math.isfinite(score.value)]:
            yield Note(f"warning: {', '.join(names)}: no finite number, so this model cannot be compared by it")
        if evaluation.guesses is not None:
            yield Note(evaluation.guesses.summary_line)


def _how(signature: str) -> str:
    """A signature for people: "per token; 71,461 tokens" of `per:token|tokens:71461`; those of sacrebleu stay.

    They are quoted beside scores as they are."""
    if SACREBLEU.search(signature):
        return signature
    parts = []
    for part in signature.split("|"):
        name, _, value = part.partition(":")
        if value.isdecimal():
            parts.append(f"{int(value):,} {name}")
        else:
            parts.append(f"{name} {value}".rstrip())
    return "; ".join(parts)


def source_lengths(text: str | None, beside: list[str] | None, picture: Path | None) -> tuple[int, ...]:
    """The numbers of --lengths. Raises UserError for others, and for options that need them."""
    if text is None:
        if beside or picture is not None:
            raise UserError(
                "--beside and --out show BLEU by source length: give its ranges, such as --lengths 10,20,30"
            )
        return ()
    # a word that is no number becomes 0, which the check of the order refuses
    limits = tuple(int(word) if word.strip().isdecimal() else 0 for word in text.split(","))
    if not all(low < high for low, high in pairwise((0, *limits))):
        raise UserError(f"--lengths ({text}) must be ascending whole numbers of words from 1 on, such as 10,20,30")
    return limits


def wanted_returns(text: str | None) -> tuple[float, ...]:
    """The numbers of --wanted. Raises UserError for others."""
    if text is None:
        return ()
    try:
        returns = tuple(map(float, text.split(",")))
    except ValueError:
        returns = (math.nan,)
    # float() also reads "nan" and "inf", which no episode can earn
    if not all(map(math.isfinite, returns)):
        raise UserError(f"--wanted ({text}) must be numbers with commas between them, such as 100,200,500")
    return returns


def _calibrated(model: "Model", calibration: Path | None, settings: "EvaluationSettings") -> "Model":
    """The model to score: with calibrated exits if there is a calibration, which must hold for the settings."""
    if calibration is None:
        return model
    from manyformer.inference.generate import decoding_from_options
    from manyformer.recipes.parts.registry import task_of

    if not task_of(model).takes_source:
        raise UserError(
            f"{calibration} holds for generated texts, and the scores of a language model generate none; `manyformer "
            "calibrate RUN --sweep` compares its texts"
        )
    decoding = decoding_from_options(beam=settings.beam, length_penalty=settings.length_penalty)
    # with the decoding of this evaluation: the guarantee holds for greedy decoding alone
    use_calibrated_exits(model, calibration, decoding)
    return model


@command(
    JUDGE,
    "manyformer baselines                                  the rules of generated tasks",
    "manyformer baselines listops --examples 10000",
    "manyformer baselines mqar symbols=64 pairs=8",
    "manyformer baselines mine.yaml data.length=256        the data of a run",
    accepts_settings=True,
)
def baselines(
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
    from manyformer.data.generated.synthetic_floors import measure_floors

    target, settings = split_arguments(arguments or [])
    if target is None:
        if settings:
            raise UserError(f"baselines need the rule or the run that {settings[0]} is a setting of")
        return _rules_output()
    data = _generated_data(target, settings)
    measured = measure_floors(data, examples)
    title = f"{data.rule}: accuracy of guesses in %, on {measured[0].targets:,} targets"
    rows = [(guess.name, f"{guess.accuracy:.1f}", f"{guess.standard_error:.1f}") for guess in measured]
    return Output(measured, [title, PageTable(("guess", "accuracy", "+-"), rows, right=(1, 2))])


# the name of version 0.2
command(None, name="floors", accepts_settings=True, hidden=True)(baselines)


def _generated_data(target: str, settings: list[str]) -> "SyntheticData":
    from manyformer.config import SyntheticData, load_run, shipped_runs
    from manyformer.recipes import recipe_names
    from manyformer.training.run_folder import recipe_lookup

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
            f"{target} learns from data of kind {run.data.kind}; baselines are those of generated data (kind synthetic)"
        )
    return cast("SyntheticData", run.data)


def _in_data(setting: str) -> str:
    """The setting as one of the data: `data.pairs=8` for `pairs=8` and for `--pairs`."""
    dashes, name = ("--", setting[2:]) if setting.startswith("--") else ("", setting)
    is_value = "=" not in name and not dashes
    if is_value or name.partition("=")[0].startswith("data."):
        return setting
    return f"{dashes}data.{name}"


def _rules_output() -> Output:
    from manyformer.config import SyntheticData

    rules = {name: " ".join((section.__doc__ or "").split()) for name, section in SyntheticData.variants.items()}
    return Output(rules, [PageTable(("rule", "what it generates"), rules.items(), cut=True)])
