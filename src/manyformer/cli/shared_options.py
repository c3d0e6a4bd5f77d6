"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from manyformer.cli.shell_completion import complete_runs

RunArgument = Annotated[str, Argument(help="The folder of a run or a saved model.", autocompletion=complete_runs)]
RunFolderArgument = Annotated[str, Argument(help="The folder of a run.", autocompletion=complete_runs)]
KeywordsArgument = Annotated[
    list[str] | None, Argument(metavar="[KEY=VALUE]...", help="Keywords of the recipe, such as depth=4.")
]
AnswerOption = Annotated[str | None, Option(help="The target of an encoder-decoder; its own translation unless given.")]
BatchOption = Annotated[int, Option(min=1, help="Batch size of generation; does not change results.")]

CalibrationOption = Annotated[
    Path | None,
    Option("--calibration", help="Early exits: a file of `manyformer calibrate`, whose certified threshold is used."),
]
ContextOption = Annotated[
    int | None,
    Option(min=1, help="Language models of text: read overlapping windows of so many tokens of each document."),
]
DeviceOption = Annotated[str | None, Option(help="cpu, cuda or mps; a GPU where there is one unless given.")]
JsonOption = Annotated[bool, Option("--json", help="Print the result as JSON.")]
JsonLinesOption = Annotated[bool, Option("--json", help="Print one JSON object for each result, one per line.")]
NewFolderOption = Annotated[str, Option(help="The folder of the new model.")]
PictureOption = Annotated[Path | None, Option(help="Also write a picture: .png, .svg or .pdf.")]
PromptCountOption = Annotated[int, Option(min=1, help="Number of prompts.")]
PromptSplitOption = Annotated[Literal["valid", "test"], Option(help="The held-out data that prompts come from.")]
RoundsOption = Annotated[int, Option(min=1, help="How many times each measurement is repeated, in turns.")]
StatsOption = Annotated[bool, Option("--stats", help="Print speed and cache size to stderr.")]
StrideOption = Annotated[
    int | None, Option(min=1, help="Tokens from a window to the next one; half of --context unless given.")
]
TokenizeOption = Annotated[
    str | None, Option(help="BLEU: sacrebleu's tokenizer, 13a unless given; none for text that is tokenized.")
]
