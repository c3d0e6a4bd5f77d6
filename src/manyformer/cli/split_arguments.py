"""Arguments that typer passes on: separating settings from names, and suggesting options for misspelled ones."""

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import typer

from manyformer.errors import UserErrors

T = TypeVar("T")


def split_arguments(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The name or file of a run, and the settings, which are all other arguments; `--key value` takes two arguments."""
    target, settings = None, []
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


def suggest_options(context: typer.Context, arguments: list[str], read: Callable[[], T]) -> T:
    """The result of `read`; errors about arguments that resemble an option of the command also suggest the option."""
    try:
        return read()
    except UserErrors as error:
        options = [option for parameter in context.command.params for option in parameter.opts if option[:2] == "--"]
        suggestions = {}
        for argument in arguments:
            key = argument.partition("=")[0]
            if key.startswith("--") and (matches := difflib.get_close_matches(key, options, n=1, cutoff=0.75)):
                suggestions[key] = matches[0]
        raise UserErrors([_with_option(line, suggestions) for line in error.lines]) from error


def _with_option(line: str, suggestions: dict[str, str]) -> str:
    for key, option in suggestions.items():
        if line.startswith((f"{key} ", f"{key}:")):
            return f"{line} (or the option {option}?)"
    return line
