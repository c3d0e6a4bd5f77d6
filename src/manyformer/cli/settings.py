"""`manyformer train NAME --help`: every setting of that run."""

import shutil
import sys
import textwrap

from manyformer.cli.console import heading, say
from manyformer.config import Run, Setting, describe_settings
from manyformer.recipes import get
from manyformer.recipes.card import GLOSSARY


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
