"""Arguments and options that several commands share, what shells complete of them, and arguments beyond typer's.

Completion reads names of recipes, run files and folders of runs without loading torch."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Sequence
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from annotated_types import Ge, Le
from typer import Argument, Option

from manyformer.base.errors import UserError
from manyformer.base.plugins import RECIPE_GROUP, entry_points
from manyformer.inference.decoding_options import DecodingOptions
from manyformer.inference.denoising_options import DenoisingOptions
from manyformer.recipes.parts.cards import recipe_modules

F = TypeVar("F", bound=Callable[..., Any])


def complete_recipes() -> list[str]:
    """The names of the recipes of this package and of installed packages, none of them imported."""
    return sorted({*recipe_modules(), *entry_points(RECIPE_GROUP)})


def complete_runs() -> list[str]:
    """The folders in `runs/`; shells complete other paths by themselves."""
    return sorted(path.as_posix() for path in Path("runs").glob("*/"))


def complete_models() -> list[str]:
    """Recipes and the folders of runs."""
    return [*complete_recipes(), *complete_runs()]


def complete_shipped_runs() -> list[str]:
    """The run files of the package."""
    from manyformer.config.shipped import shipped_runs

    return list(shipped_runs())


def complete_trainings(context: typer.Context) -> list[str]:
    """What `train` takes as its first argument; settings follow it."""
    return _before_settings(context, [*complete_shipped_runs(), *complete_models(), *_run_files()])


def complete_comparisons(context: typer.Context) -> list[str]:
    """What `compare` takes as its first argument; settings follow it."""
    from manyformer.config.shipped import shipped_comparisons

    return _before_settings(context, [*shipped_comparisons(), *_run_files()])


def _before_settings(context: typer.Context, names: Iterable[str]) -> list[str]:
    # the first argument is there already
    if context.params.get("arguments"):
        return []
    return list(names)


def _run_files() -> list[str]:
    return sorted(path.name for path in Path().glob("*.yaml"))


RunArgument = Annotated[str, Argument(help="The folder of a run or a saved model.", autocompletion=complete_runs)]
RunFolderArgument = Annotated[str, Argument(help="The folder of a run.", autocompletion=complete_runs)]
KeywordsArgument = Annotated[
    list[str] | None, Argument(metavar="[KEY=VALUE]...", help="Keywords of the recipe, such as depth=4.")
]
AllOption = Annotated[bool, Option("--all", help="Print all details instead of a screen.")]
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
DECODING_NAMES = {"max_new": ("--max-new", "--length"), "crop": ("--crop",), "best": ("--best", "--n-best")}
"""How options of decoding are spelled that have two names, or that would have a second one to switch them off."""


def decoding_option(name: str, note: str = "", *, panel: str | None = None) -> Any:
    """The command-line option for one of the `DecodingOptions`, with its bounds and meaning; `note` ends the help."""
    names = DECODING_NAMES.get(name, ())
    return _described_option(DecodingOptions.__annotations__[name], names, note=note, panel=panel)


def denoising_option(name: str) -> Any:
    """The command-line option for one of the `DenoisingOptions`, with its bounds and meaning."""
    return _described_option(DenoisingOptions.__annotations__[name], (), note="", panel=None, kind="Diffusion: ")


def _described_option(annotation: Any, names: tuple[str, ...], *, note: str, panel: str | None, kind: str = "") -> Any:
    *metadata, meaning = annotation.__metadata__
    # bounds that are no closed ones, such as "above 0", are checked when the options become a decoding
    minimum: Any = next((bound.ge for bound in metadata if isinstance(bound, Ge)), None)
    maximum: Any = next((bound.le for bound in metadata if isinstance(bound, Le)), None)
    help_text = f"{kind}{meaning} {note}".strip()
    return Option(*names, min=minimum, max=maximum, help=help_text, rich_help_panel=panel)


def decoding_options(*names: str, **notes: str) -> Callable[[F], F]:
    """Replace a command's parameter `**decoding: Unpack[DecodingOptions]` by these options; `notes` end their helps."""
    # typer has no option that is either a text or several
    lists = {"stop": list[str] | None, "stop_ids": list[int] | None}
    types: dict[str, Any] = {**get_type_hints(DecodingOptions), **lists}

    def option(name: str) -> Parameter:
        annotation = Annotated[types[name], decoding_option(name, notes.get(name, ""))]  # type: ignore[valid-type]
        return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

    def expand(function: F) -> F:
        # without the last, `**decoding`, in whose place the options come
        parameters = list(inspect.signature(function).parameters.values())[:-1]
        # before all other options, in the order of the call
        first = sum(parameter.kind is not Parameter.KEYWORD_ONLY for parameter in parameters)
        parameters[first:first] = map(option, names)
        function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return function

    return expand


def split_arguments(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The name or file of a run, and the settings, which are all other arguments; `--key value` takes two arguments."""
    target = None
    settings = []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        if argument.startswith("--"):
            settings.append(argument)
            # its value is the next argument, unless that is an option itself
            if "=" not in argument and remaining and not remaining[0].startswith("--"):
                settings.append(remaining.pop(0))
        # a file may have = in its name
        elif target is None and ("=" not in argument or Path(argument).is_file()):
            target = argument
        else:
            settings.append(argument)
    return target, settings


def refuse_options(context: typer.Context, names: Iterable[str], message: str) -> None:
    """Raise UserError with `message`, in which {option} is its name, for the first of these options that was given."""
    for parameter in context.command.params:
        # by the value: an option that was given its default changes nothing, and need not be refused
        if parameter.name in names and context.params[parameter.name] not in (None, False, [], (), parameter.default):
            raise UserError(message.format(option=parameter.opts[0]))


def suggest_options(lines: Iterable[str], arguments: Iterable[str], options: Sequence[str]) -> list[str]:
    """Lines of errors, of which those about an argument that resembles one of the options suggest the option, too."""
    # settings may look like options, so that either may have been meant
    keys = {argument.partition("=")[0] for argument in arguments if argument.startswith("--")}
    suggestions = {key: difflib.get_close_matches(key, options, n=1, cutoff=0.75) for key in keys.difference(options)}

    def with_option(line: str) -> str:
        for key, matches in suggestions.items():
            if matches and line.startswith((f"{key} ", f"{key}:")):
                return f"{line} (or the option {matches[0]}?)"
        return line

    return [with_option(line) for line in lines]


def split_commas(text: str | None) -> list[str]:
    """The names in a text that commas separate; none without a text."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]
