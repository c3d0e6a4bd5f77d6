"""`manyformer predict`: label texts, words, images or recordings with a trained model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from manyformer.base.errors import UserError
from manyformer.cli.app import USE, command
from manyformer.cli.console import json_line, print_note, print_text
from manyformer.cli.model_arguments import model_folder, resolve_device
from manyformer.cli.options import DeviceOption, JsonLinesOption, complete_runs

if TYPE_CHECKING:
    from manyformer.inference.evaluate import PredictedInput


@command(
    USE,
    "manyformer predict runs/labels-trec questions.txt",
    "echo 'Who wrote Hamlet?' | manyformer predict runs/labels-trec --top 3",
    "manyformer predict runs/labels-trec questions.jsonl > labelled.jsonl",
    "manyformer predict runs/tag-relations parsed.conllu > labelled.conllu",
    "manyformer predict runs/answer-questions questions.jsonl --top 3",
    "manyformer predict runs/images-vit photos/ --top 2 --json",
    "manyformer predict downloads/bert-sentiment reviews.txt",
)
def predict(
    run: Annotated[
        str, Argument(help="The folder of a run or a model, also one of transformers.", autocompletion=complete_runs)
    ],
    file: Annotated[
        str,
        Argument(
            help="Texts, one in a line, or a table (TSV, CSV, JSONL); pairs of sentences, or documents and questions, "
            "as a table; sentences with trees in CoNLL-U; images or recordings in a file or folder. '-' reads standard "
            "input."
        ),
    ] = "-",
    *,
    top: Annotated[int, Option(min=1, help="Number of labels of each input, the most probable first.")] = 1,
    device: DeviceOption = None,
    as_json: JsonLinesOption = False,
) -> None:
    """Label texts, the words of sentences, images or recordings with a trained classifier or tagger.

    Texts and pairs of sentences: a line with the label and its probability for each. Questions: a line with the answer
    and its probability. Sentences: CoNLL-U with the labels in their column; its
    trees are read, its labels are ignored. Images and recordings: a line with the file, the label and its
    probability.

    A table is read by the settings of the run's data. Where it has labels, a note at the end says how many agree.
    """
    from manyformer.inference.evaluate import predict as predict_labels

    model_folder(run)
    # a table of JSON lines is answered in kind
    write_json = as_json or Path(file).suffix in (".jsonl", ".ndjson")
    inputs = 0
    labelled = 0
    agreeing = 0
    for item in predict_labels(run, file, top=top, device=resolve_device(device), log=print_note):
        print_text(json_line(_record(item)) if write_json else _text(item))
        inputs += 1
        if item.input.expected is not None:
            labelled += 1
            # the most probable label alone counts, whatever --top prints
            agreeing += item.prediction[0][0].label == item.input.expected
    if not inputs:
        raise UserError(f"{file}: there is nothing to label in it")
    if labelled:
        print_note(f"{agreeing:,} of {labelled:,} labels in {file} agree ({agreeing / labelled:.1%})")


def _record(item: "PredictedInput") -> dict[str, Any]:
    labels = [[label._asdict() for label in prediction] for prediction in item.prediction]
    if not item.input.words:
        record = {"input": item.input.name}
        if item.input.expected is not None:
            record["expected"] = item.input.expected
        return {**record, "labels": labels[0]}
    word_records = [
        {"word": word, "labels": word_labels} for word, word_labels in zip(item.input.words, labels, strict=True)
    ]
    return {"input": item.input.name, "words": word_records}


def _text(item: "PredictedInput") -> str:
    if item.input.annotate is not None:
        # one label for each word, in the column of the sentence itself
        return "\n".join([*item.input.annotate([labels[0].label for labels in item.prediction]), ""])
    cells = [f"{label}\t{probability:.4f}" for label, probability in item.prediction[0]]
    return "\t".join([item.input.name, *cells] if item.input.is_file else cells)
