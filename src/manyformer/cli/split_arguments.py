"""Arguments beyond what typer reads: settings beside names, suggestions for misspelled options, options of one case."""

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path

import typer

from manyformer.errors import UserError


def split_arguments(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The name or file of a run, and the settings, which are all other arguments; `--key value` takes two arguments."""
    target = None
    settings = []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        if argument.startswith("--"):
            settings.append(argument)
            if "=" not in argument and remaining and not remaining[0].startswith("--"):
                settings.append(remaining.pop(0))
        elif target is None and ("=" not in argument or Path(argument).is_file()):
            target = argument
        else:
            settings.append(argument)
    return target, settings


def refuse_options(context: typer.Context, names: Iterable[str], message: str) -> None:
    """Raise UserError with `message`, in which {option} is its name, for the first of these options that was given."""
    for parameter in context.command.params:
        if parameter.name in names and context.params[parameter.name] not in (None, False, [], (), parameter.default):
            raise UserError(message.format(option=parameter.opts[0]))


def suggest_options(lines: Iterable[str], arguments: Iterable[str], options: Sequence[str]) -> list[str]:
    """Lines of errors, of which those about an argument that resembles one of the options suggest the option, too."""
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
