"""The words of a command line that typer leaves to us: settings told from names, and near-misses of options."""

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import typer

from manyformer.errors import UserErrors

T = TypeVar("T")


def split_words(words: list[str]) -> tuple[str | None, list[str]]:
    """The run's name or file, and everything else, which are settings; `--key value` takes the word after it."""
    target, settings = None, []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word.startswith("--"):
            settings.append(word)
            if "=" not in word and rest and not rest[0].startswith("--"):
                settings.append(rest.pop(0))
        elif target is None and ("=" not in word or Path(word).is_file()):
            target = word
        else:
            settings.append(word)
    return target, settings


def with_options(context: typer.Context, words: list[str], read: Callable[[], T]) -> T:
    """What `read` makes of the words; a complaint about a word that is nearly an option names the option as well."""
    try:
        return read()
    except UserErrors as error:
        options = [option for parameter in context.command.params for option in parameter.opts if option[:2] == "--"]
        near = {}
        for word in words:
            key = word.partition("=")[0]
            if key.startswith("--") and (found := difflib.get_close_matches(key, options, n=1, cutoff=0.75)):
                near[key] = found[0]
        raise UserErrors([_with_option(line, near) for line in error.lines]) from error


def _with_option(line: str, near: dict[str, str]) -> str:
    for key, option in near.items():
        if line.startswith((f"{key} ", f"{key}:")):
            return f"{line} (or the option {option}?)"
    return line
