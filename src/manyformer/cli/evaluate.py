"""`manyformer evaluate`: score a trained model."""

from dataclasses import asdict
from typing import Annotated

from typer import Argument, Option

from manyformer.cli.app import JUDGE, command
from manyformer.cli.console import print_json, print_result, print_table, status_line
from manyformer.cli.decoding_arguments import decoding_option
from manyformer.cli.model_arguments import changed_keywords, data_paths, resolve_device
from manyformer.cli.shared_options import DeviceOption, JsonOption, TokenizeOption


@command(
    JUDGE,
    "manyformer evaluate runs/lm-stdlib",
    "manyformer evaluate runs/lm-stdlib --data other.txt",
    "manyformer evaluate runs/reformer num_hashes=8",
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
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Score a trained model on held-out data with the scores of its task.

    Language models: perplexity, bits per character and byte. Translations: BLEU, chrF and TER with sacrebleu's
    signatures, exact matches. Classifiers: accuracy and F1. Each score says how it was computed.
    """
    from manyformer.evaluate import EvaluationSettings
    from manyformer.evaluate import evaluate as score

    settings = EvaluationSettings(beam=beam, length_penalty=length_penalty, tokenize=tokenize, lowercase=lowercase)
    with status_line(f"scoring {run}") as status:
        evaluation = score(
            run,
            split=split,
            data=data_paths(data),
            settings=settings,
            keywords=changed_keywords(run, keywords or []),
            device=resolve_device(device),
            on_progress=lambda share: status(f"scoring {run}: {share:.0%}"),
        )
    if as_json:
        print_json({"run": run, **asdict(evaluation)})
        return
    print_result(f"{run} on {evaluation.data}: {evaluation.how}")
    rows = [(score.name, f"{score.value:.{score.digits}f}", score.signature) for score in evaluation.scores]
    print_table(("score", "value", "how"), rows, right=(1,))
