"""The public interface: names with signatures, recipes, tasks, kinds of data, settings, commands with help."""

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer

import manyformer as mf
from manyformer.cli import import_commands
from manyformer.cli.app import app
from manyformer.config import DATA_SECTIONS, describe_settings, json_schema, shipped_comparisons, shipped_runs
from manyformer.models.tasks import TASKS
from sameness.commands import run_command

ROOT = Path(__file__).parents[2]
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
MODULE = re.compile(r"\bmanyformer\.(\w+\.)*(?=\w)")
"""Where a type is defined is no part of the interface."""
DOCUMENTED_IMPORT = re.compile(r"^[ ]*from (manyformer[\w.]*) import ([\w, ]+)$", re.MULTILINE)


def interface() -> dict[str, Any]:
    """All of it."""
    return {part: work() for part, work in PARTS.items()}


def names() -> dict[str, Any]:
    """The names of the package, with signatures, and the public methods of classes."""
    return {name: _described(getattr(mf, name)) for name in sorted(mf.__all__) if name != "__version__"}


def documented_imports() -> dict[str, Any]:
    """What pages and examples import from modules, with signatures."""
    found: dict[str, Any] = {}
    for module, name in sorted(set(_imports_of_pages())):
        try:
            found[f"{module}.{name}"] = _described(getattr(importlib.import_module(module), name))
        except (ImportError, AttributeError) as error:
            found[f"{module}.{name}"] = f"{type(error).__name__}: {error}"
    return found


def _imports_of_pages() -> Iterator[tuple[str, str]]:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")]
    for page in pages:
        for module, imported in DOCUMENTED_IMPORT.findall(page.read_text(encoding="utf-8")):
            if module.split(".")[0] == "manyformer":
                yield from ((module, name.split(" as ")[0].strip()) for name in imported.split(",") if name.strip())


def _described(value: Any) -> Any:
    if inspect.isclass(value):
        ours = [each for each in value.__mro__ if each.__module__.split(".")[0] == "manyformer"]
        public = {name: getattr(value, name) for each in ours for name in vars(each) if not name.startswith("_")}
        methods = {name: _signature(member) for name, member in public.items() if inspect.isroutine(member)}
        return {"signature": _signature(value), "methods": methods, "others": sorted(public.keys() - methods.keys())}
    return _signature(value) if inspect.isroutine(value) else _plain(repr(value))


def _signature(value: Any) -> str:
    try:
        return _plain(str(inspect.signature(value)))
    except (TypeError, ValueError):
        return "no signature"


def _plain(text: str) -> str:
    return MODULE.sub("", ADDRESS.sub("", text))


def recipes() -> dict[str, Any]:
    """The keywords of each recipe with types, defaults and meanings, and what its card says."""
    described = {}
    for name, recipe in sorted(mf.recipes().items()):
        card = recipe.card
        keywords = {
            keyword.name: _plain(f"{inspect.formatannotation(keyword.annotation)} = {keyword.default!r}")
            for keyword in recipe.signature.parameters.values()
        }
        described[name] = {
            "keywords": keywords,
            "order": list(keywords),
            "title": card.title,
            "paper": card.paper,
            "summary": card.summary,
            "task": card.task.name,
            "cost": card.cost,
            "backends": list(card.backends),
            "reasons": dict(card.reasons),
        }
    return described


def tasks() -> dict[str, Any]:
    """What each task says of itself."""
    facts = ("title", "per_token", "takes_source", "plays_for_returns", "generates", "command", "argument")
    return {
        name: {
            **{fact: getattr(task, fact) for fact in facts},
            "model": task.model.__name__,
            "data forms": dict(task.data_forms),
            "scores": sorted(task.score_kinds),
            "metrics": dict(task.metrics),
            "reasons": dict(task.reasons),
        }
        for name, task in sorted(TASKS.items())
    }


def settings() -> dict[str, Any]:
    """Every setting of a run file with its type, default and description; kinds of data; shipped runs."""
    rows = {row.key: f"{row.type} = {row.default}: {row.doc}" for row in describe_settings()}
    kinds = {}
    for name, section in sorted(DATA_SECTIONS.items()):
        kinds[name] = sorted(section.model_fields) if hasattr(section, "model_fields") else _plain(repr(section))
    return {
        "settings": rows,
        "data kinds": kinds,
        "schema": json_schema(),
        "runs": sorted(shipped_runs()),
        "comparisons": sorted(shipped_comparisons()),
    }


def commands() -> dict[str, Any]:
    """Each command with its help as shown, and its options with types and defaults."""
    import_commands()
    described: dict[str, Any] = {"manyformer": {"help": run_command(["--help"]).out}}
    for words, command in _all_commands((), typer.main.get_command(app)):
        described[" ".join(words)] = {
            "help": run_command([*words, "--help"]).out,
            "options": {
                str(option.name): f"{'/'.join(option.opts)} = {option.default!r}, "
                f"{'required' if option.required else 'optional'}, {option.nargs} values"
                for option in command.params
            },
        }
    for target in ("transformer-lm", "lm/stdlib", "vit"):
        described[f"train {target}"] = {"help": run_command(["train", target, "--help"]).out}
    return described


def _all_commands(words: tuple[str, ...], command: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, inner in sorted(getattr(command, "commands", {}).items()):
        yield (*words, name), inner
        yield from _all_commands((*words, name), inner)


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "names": names,
    "documented imports": documented_imports,
    "recipes": recipes,
    "tasks": tasks,
    "settings": settings,
    "commands": commands,
}
