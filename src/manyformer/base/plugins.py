"""Plug-ins: modules outside the package that add recipes, tasks and kinds of data, installed or named by the user."""

import importlib
import importlib.metadata
import os
import sys
import traceback
from collections.abc import Iterable
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from manyformer.base.errors import UserError

RECIPE_GROUP = "manyformer.recipes"
"""The entry points of installed packages whose modules define recipes: the name is the recipe's."""

TASK_GROUP = "manyformer.tasks"
"""The entry points of installed packages whose modules define a task or a kind of data: the name is its name."""


class PluginRecord(NamedTuple):
    """An imported plug-in: its module, the version of its package ("" for a single module), and its file."""

    name: str
    version: str
    file: str


_imported: dict[str, ModuleType] = {}
"""The imported plug-ins by the name of their module."""

_command_line_imports: list[str] = []
"""What `--import` names; it is recorded in the runs that this process trains."""


@cache
def entry_points(group: str) -> dict[str, EntryPoint]:
    """The entry points of all installed packages by name. Raises UserError if two modules share a name."""
    by_name: dict[str, EntryPoint] = {}
    for entry in importlib.metadata.entry_points(group=group):
        if entry.name in by_name and by_name[entry.name].module != entry.module:
            raise UserError(
                f"'{entry.name}' is offered by two modules, {by_name[entry.name].module} and {entry.module}; "
                "uninstall one of their packages"
            )
        by_name[entry.name] = entry
    return by_name


def import_entry_point(group: str, name: str) -> bool:
    """Import the module that an installed package offers under `name`; False if none does. Raises UserError."""
    # the module is imported when its name is first used: installed packages cost nothing before
    entry = entry_points(group).get(name)
    if entry is None:
        return False
    if entry.module not in _imported:
        package = ""
        if entry.dist is not None:
            package = f" of the package {entry.dist.name}"
        _import(entry.module, f"the module {entry.module}{package}, which offers '{name}',")
    return True


def import_entry_points(group: str) -> None:
    """Import the modules of all entry points of a group."""
    for name in entry_points(group):
        import_entry_point(group, name)


def import_modules(names: Iterable[str], folder: Path = Path()) -> tuple[str, ...]:
    """Import modules by their dotted name or the path of their file; returns the names under which a run records them.

    Modules are looked for in the installed packages, the current folder and `folder`, the folder of the run file that
    names them. Raises UserError.
    """
    return tuple(dict.fromkeys(_import_named(name, folder) for name in names))


def import_for_run(names: Iterable[str], folder: Path = Path()) -> tuple[str, ...]:
    """`import_modules` for a run that is about to be trained, which also records the modules of the command line."""
    return tuple(dict.fromkeys([*import_modules(names, folder), *_command_line_imports]))


def import_from_command_line(names: Iterable[str]) -> None:
    """Import the modules that `--import` names and record them in all runs that this process trains."""
    _command_line_imports[:] = import_modules(names)


def plugin_records() -> list[PluginRecord]:
    """All plug-ins imported so far."""
    return [PluginRecord(name, _version(name), module.__file__ or "") for name, module in _imported.items()]


def imported_file(name: str) -> ModuleType | None:
    """The imported plug-in that a path names, None if none does."""
    file = Path(name).resolve()
    return next((module for module in _imported.values() if Path(module.__file__ or "").resolve() == file), None)


def is_external(module: str) -> bool:
    """Whether a module, by its dotted name, belongs to another package."""
    return module.partition(".")[0] != __name__.partition(".")[0]


def _import_named(name: str, folder: Path) -> str:
    file = None
    if name.endswith(".py") or "/" in name:
        file = next((path for path in (folder / name, Path(name)) if path.exists()), None)
        if file is None:
            raise UserError(f"there is no file {name} to import")
    module_name = name if file is None else file.stem
    for searched in (Path(), folder) if file is None else (file.parent,):
        if (resolved := str(searched.resolve())) not in sys.path:
            # at the end, so that no module of these folders hides an installed one
            sys.path.append(resolved)
    module = _import(module_name, f"the module {name}", folder)
    # an installed module of the same name would have been imported in the place of the file
    origin = Path(module.__file__ or "").resolve()
    if file is not None and origin not in (file.resolve(), file.resolve() / "__init__.py"):
        raise UserError(f"{name} cannot be imported: its name is that of {origin}; rename the file")
    files_in_folder = [(folder / f"{name}.py").resolve(), (folder / name / "__init__.py").resolve()]
    if file is None and (folder.resolve() == Path.cwd() or origin not in files_in_folder):
        return name
    return _recorded_path(origin.parent if origin.name == "__init__.py" else origin)


def _recorded_path(path: Path) -> str:
    """The path relative to the current folder if it lies below it, else the absolute path."""
    if path.is_relative_to(Path.cwd()):
        relative = str(path.relative_to(Path.cwd()))
        if relative.endswith(".py"):
            return relative
        return f".{os.sep}{relative}"
    return str(path)


def _import(module_name: str, description: str, folder: Path = Path()) -> ModuleType:
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # the module itself or a package that it lies in, not one that it imports
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            places = " or ".join(dict.fromkeys(str(path.resolve()) for path in (Path(), folder)))
            raise UserError(
                f"{description} does not exist: neither in {places} nor in the installed packages"
            ) from error
        raise UserError(f"{description} needs the module {error.name}, which is not installed") from error
    except UserError as error:
        raise UserError(f"{description} cannot be used: {error}") from error
    except Exception as error:
        # the line that failed is the author's, whose plug-in the user may have written
        frame = traceback.extract_tb(error.__traceback__)[-1]
        if isinstance(error, SyntaxError):
            location = ""
        else:
            location = f" ({frame.filename}, line {frame.lineno})"
        raise UserError(f"{description} fails on import: {type(error).__name__}: {error}{location}") from error
    _imported[module_name] = module
    return module


def _version(module_name: str) -> str:
    package = module_name.partition(".")[0]
    for distribution in importlib.metadata.packages_distributions().get(package, ()):
        return importlib.metadata.version(distribution)
    return ""
