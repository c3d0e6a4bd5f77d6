"""Makes the package `manyformer_check` of those modules of manyformer that checks need.

They are copied from the repository around this folder, under their new names. A source distribution has the copies in
place of the repository."""

import ast
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
SOURCES = REPOSITORY / "src"
PACKAGE = HERE / "src" / "manyformer_check"

ENGINE = "manyformer.analysis.contracts"
"""The package whose modules become those of `manyformer_check`."""

NEW_NAMES = {
    # what knows the library's own models stays there; the checks of all other ones have the same functions
    "manyformer.analysis.own_models": "manyformer_check.check",
    ENGINE: "manyformer_check",
    "manyformer": "manyformer_check",
}
"""Modules by their first names; of those that fit, the first counts."""

NEW_WORDS = {
    r"\bmf\.(check\w*|Adapter)\b": r"mc.\1",
    r"\bmanyformer check\b": "manyformer-check",
    r"\bimport manyformer as mf\b": "import manyformer_check as mc",
}
"""What stands in sentences for users, and what it is called here."""

VERSION = re.compile(r'^VERSION = "([^"]+)"$', re.MULTILINE)


class CustomMetadataHook(MetadataHookInterface):
    """Copies the modules before anything else is asked of the project, and says the version."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the version."""
        # a source distribution has this file, and the copies
        if not (HERE / "PKG-INFO").is_file():
            copy_modules()
            shutil.copy(REPOSITORY / "LICENSE", HERE / "LICENSE")
        version = VERSION.search((PACKAGE / "base" / "__init__.py").read_text(encoding="utf-8"))
        assert version is not None
        metadata["version"] = version[1]


def copy_modules() -> None:
    """Write the package anew. Raises ValueError for a module that needs one which is not part of it."""
    shutil.rmtree(PACKAGE, ignore_errors=True)
    modules = needed_modules()
    for module in modules:
        write_module(module, renamed(source_of(module).read_text(encoding="utf-8")))
    for module in modules:
        for package in parents(new_name(module)):
            stub = PACKAGE.parent.joinpath(*package.split("."), "__init__.py")
            if not stub.exists():
                stub.write_text('"""Parts of manyformer that the checks need."""\n', encoding="utf-8")
    init = PACKAGE / "__init__.py"
    lines = "from manyformer_check.base import VERSION as __version__\n"
    init.write_text(init.read_text(encoding="utf-8") + lines, encoding="utf-8")
    (PACKAGE / "py.typed").touch()


def needed_modules() -> list[str]:
    """The modules of the engine and all of manyformer that these import, at once or in functions."""
    folder = source_of(ENGINE).parent
    todo = [ENGINE, "manyformer.base", *(f"{ENGINE}.{file.stem}" for file in folder.glob("[!_]*.py"))]
    needed: set[str] = set()
    while todo:
        module = todo.pop()
        if module not in needed:
            needed.add(module)
            todo += imported_modules(module)
    return sorted(needed)


def imported_modules(module: str) -> Iterator[str]:
    """The modules of manyformer that a module imports anywhere, but for what other modules stand for here."""
    for node in ast.walk(ast.parse(source_of(module).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            full_names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if has_source(name) else str(node.module) for name in full_names]
        else:
            continue
        yield from (
            name for name in names if name.startswith("manyformer.") and new_name(name) not in NEW_NAMES.values()
        )


def has_source(module: str) -> bool:
    """Whether this is the name of a module and not of something in one."""
    path = SOURCES.joinpath(*module.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def source_of(module: str) -> Path:
    """The file of a module or of a package."""
    path = SOURCES.joinpath(*module.split("."))
    if path.is_dir():
        return path / "__init__.py"
    return path.with_suffix(".py")


def new_name(module: str) -> str:
    """The name of a module in the new package."""
    for first_name, name in NEW_NAMES.items():
        if module == first_name or module.startswith(f"{first_name}."):
            return name + module.removeprefix(first_name)
    return module


def renamed(source: str) -> str:
    """The source of a module with the new names of modules and of what users write."""
    for pattern, words in NEW_WORDS.items():
        source = re.sub(pattern, words, source)
    return re.sub(r"\bmanyformer\.[a-z_.]*[a-z_]", lambda match: new_name(match[0]), source)


def write_module(module: str, source: str) -> None:
    """Write the source of a module of manyformer to its place in the new package."""
    path = PACKAGE.parent.joinpath(*new_name(module).split("."))
    if source_of(module).name == "__init__.py":
        file = path / "__init__.py"
    else:
        file = path.with_suffix(".py")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source, encoding="utf-8")


def parents(module: str) -> Iterator[str]:
    """The packages that a module is in."""
    while "." in module:
        module = module.rpartition(".")[0]
        yield module
