"""`manyformer train NAME --help`: all settings of a run."""

import shutil
import sys
import textwrap

from manyformer.cli.console import print_heading, print_result
from manyformer.config import RunConfig, SettingHelp, describe_settings
from manyformer.recipes import get_recipe


def print_settings(target: str, run: RunConfig) -> None:
    """Print all settings of a run with its values as defaults, the recipe's keywords first."""
    recipe = get_recipe(run.recipe)
    options = "[--dry-run] [--print-config] [--fresh] [--quiet] [--json]"
    print_result(f"Usage: manyformer train {target} [KEY=VALUE]... {options}", "")
    print_result(f"{recipe.card.name}: {recipe.card.title}. {recipe.card.summary}")
    rows = describe_settings(run, recipe.signature)
    print_heading(f"Keywords of {run.recipe}, with this run's values")
    for row in rows:
        if row.key.startswith("model."):
            _print_setting(row._replace(key=row.key.removeprefix("model.")))
    print_heading("Settings of the run, with its values")
    for row in rows:
        if not row.key.startswith("model."):
            _print_setting(row)
    print_heading("Examples")
    for settings in ("--dry-run", "limits.steps=100 out=runs/try", "--optim.lr 5e-4 --seed 1"):
        print_result(f"manyformer train {target} {settings}")


def _print_setting(setting: SettingHelp) -> None:
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 100
    print_result(f"  {setting.key}={setting.default}   ({setting.type})")
    if setting.doc:
        print_result(textwrap.fill(setting.doc, width, initial_indent=" " * 6, subsequent_indent=" " * 6))
