"""Arguments and options that several commands share, those of decoding among them."""

import inspect
from collections.abc import Callable
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

from annotated_types import Ge, Le
from typer import Argument, Option

from manyformer.cli.shell_completion import complete_runs
from manyformer.decoding_options import DecodingOptions

F = TypeVar("F", bound=Callable[..., Any])

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
RoundsOption = Annotated[int, Option(min=1, help="How many times each measurement is repeated, in turns.")]
StatsOption = Annotated[bool, Option("--stats", help="Print speed and cache size to stderr.")]
StrideOption = Annotated[
    int | None, Option(min=1, help="Tokens from a window to the next one; half of --context unless given.")
]
TokenizeOption = Annotated[
    str | None, Option(help="BLEU: sacrebleu's tokenizer, 13a unless given; none for text that is tokenized.")
]

DECODING_NAMES = {"max_new": ("--max-new", "--length"), "crop": ("--crop",)}
"""How options of decoding are spelled that have two names, or that would have a second one to switch them off."""


def decoding_option(name: str, note: str = "", *, panel: str | None = None) -> Any:
    """The command-line option for one of the `DecodingOptions`, with its bounds and meaning; `note` ends the help."""
    *metadata, meaning = DecodingOptions.__annotations__[name].__metadata__
    minimum: Any = next((bound.ge for bound in metadata if isinstance(bound, Ge)), None)
    maximum: Any = next((bound.le for bound in metadata if isinstance(bound, Le)), None)
    help_text = f"{meaning} {note}".strip()
    return Option(*DECODING_NAMES.get(name, ()), min=minimum, max=maximum, help=help_text, rich_help_panel=panel)


def decoding_options(*names: str, **notes: str) -> Callable[[F], F]:
    """Replace a command's parameter `**decoding: Unpack[DecodingOptions]` by these options; `notes` end their helps."""
    types: dict[str, Any] = {**get_type_hints(DecodingOptions), "stop": list[str] | None}

    def option(name: str) -> Parameter:
        annotation = Annotated[types[name], decoding_option(name, notes.get(name, ""))]  # type: ignore[valid-type]
        return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

    def expand(function: F) -> F:
        parameters = list(inspect.signature(function).parameters.values())[:-1]
        first = sum(parameter.kind is not Parameter.KEYWORD_ONLY for parameter in parameters)
        parameters[first:first] = map(option, names)
        function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return function

    return expand
