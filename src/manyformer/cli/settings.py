"""Settings on the command line of `train`: told apart from the run's name, listed, and near-misses of options."""

import difflib
import shutil
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import typer

from manyformer.cli.console import heading, say
from manyformer.config import Run, Setting, describe_settings
from manyformer.errors import UserErrors
from manyformer.recipes import get
from manyformer.recipes.card import GLOSSARY

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


def print_settings(target: str, run: Run) -> None:
    """All settings of a run, with its values as defaults, the recipe's keywords first."""
    recipe = get(run.recipe)
    say(f"Usage: manyformer train {target} [KEY=VALUE]... [--dry-run] [--print-config] [--fresh] [--quiet] [--json]")
    say()
    say(f"{recipe.card.name}: {recipe.card.title}. {recipe.card.new}")
    rows = describe_settings(run, recipe.signature, GLOSSARY)
    heading(f"Keywords of {run.recipe}, with this run's values")
    for row in rows:
        if row.key.startswith("model."):
            _print_setting(row._replace(key=row.key.removeprefix("model.")))
    heading("Settings of the run, with its values")
    for row in rows:
        if not row.key.startswith("model."):
            _print_setting(row)
    heading("Examples")
    say(f"manyformer train {target} --dry-run")
    say(f"manyformer train {target} limits.steps=100 out=runs/try")
    say(f"manyformer train {target} --optim.lr 5e-4 --seed 1")


def _print_setting(setting: Setting) -> None:
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 100
    say(f"  {setting.key}={setting.default}   ({setting.type})")
    if setting.doc:
        say(textwrap.fill(setting.doc, width, initial_indent=" " * 6, subsequent_indent=" " * 6))
