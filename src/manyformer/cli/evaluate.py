"""`manyformer evaluate`: score a trained model."""

from typing import TYPE_CHECKING, Annotated

import typer

from manyformer.cli.app import JUDGE, DeviceOption, app, examples

if TYPE_CHECKING:
    from manyformer.evaluate import Evaluation


@app.command(
    "evaluate",
    rich_help_panel=JUDGE,
    epilog=examples(
        "manyformer evaluate runs/lm-stdlib",
        "manyformer evaluate runs/lm-stdlib --data other.txt",
        "manyformer evaluate runs/reformer num_hashes=8",
        "manyformer evaluate runs/translate-multi30k --data test.en --data test.de --beam 8 --tokenize none --json",
    ),
)
def evaluate(
    run: Annotated[str, typer.Argument(help="The folder of a run.")],
    keywords: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Keywords that change no weights, such as num_hashes=8."),
    ] = None,
    *,
    split: Annotated[
        str | None, typer.Option(help="test or valid of the run's own data; test if there is one unless given.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="Score this file instead; for parallel files give the option twice, source first."),
    ] = None,
    beam: Annotated[int, typer.Option(min=1, help="Translations: width of the beam.")] = 4,
    length_penalty: Annotated[float, typer.Option(help="Translations: length penalty of the beam.")] = 0.6,
    tokenize: Annotated[
        str | None, typer.Option(help="BLEU: sacrebleu's tokenizer, 13a unless given; none for text that is tokenized.")
    ] = None,
    lowercase: Annotated[bool, typer.Option("--lowercase", help="BLEU: compare without upper case.")] = False,
    device: DeviceOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the scores as JSON.")] = False,
) -> None:
    """Score a trained model on held-out data with the scores of its task.

    Language models: perplexity, bits per character and byte. Translations: BLEU, chrF and TER with sacrebleu's
    signatures, exact matches. Classifiers: accuracy and F1. Each score says how it was computed.
    """
    from manyformer.cli.console import status_line
    from manyformer.cli.model_arguments import changed_keywords, data_paths, resolve_device
    from manyformer.evaluate import EvaluationSettings
    from manyformer.evaluate import evaluate as score

    keyword_changes = changed_keywords(run, keywords or [])
    settings = EvaluationSettings(beam=beam, length_penalty=length_penalty, tokenize=tokenize, lowercase=lowercase)
    with status_line(f"scoring {run}") as status:
        evaluation = score(
            run,
            split=split,
            data=data_paths(data),
            settings=settings,
            keywords=keyword_changes,
            device=resolve_device(device),
            on_progress=lambda share: status(f"scoring {run}: {share:.0%}"),
        )
    _print(run, evaluation, as_json=as_json)


def _print(run: str, evaluation: "Evaluation", *, as_json: bool) -> None:
    from dataclasses import asdict

    from manyformer.cli.console import print_json, print_result, print_table

    if as_json:
        print_json({"run": run, **asdict(evaluation)})
        return
    print_result(f"{run} on {evaluation.data}: {evaluation.how}")
    rows = [(score.name, f"{score.value:.{score.digits}f}", score.signature) for score in evaluation.scores]
    print_table(("score", "value", "how"), rows, right=(1,))
