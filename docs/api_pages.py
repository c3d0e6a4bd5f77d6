"""The pages of the API: one for each public module, with a list of its names, and one for each of these names.

Every name has its signature, its description, where it is defined, and the pages that speak of it."""

import ast
import importlib
import inspect
import pkgutil
import re
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import manyformer
from manyformer.base.files.text_tables import markdown_table

SINGLE_MODULES = (
    *("nn.core", "nn.feed_forward.feedforward", "nn.residual", "nn.runtime.head_selection"),
    *("base.errors", "base.plugins", "models.scores"),
    *(
        "conversion.surgery.head_sharing",
        "conversion.surgery.recipe_conversions",
        "nn.structures",
        "data.generated.normalization",
    ),
)
"""The public modules that are not packages, or whose names no package exports."""

MAX_MENTIONS = 12
"""Pages that speak of a name and are linked on its page; of a name that stands in more, the first ones."""


class PublicName(NamedTuple):
    """A name with the module that is named first for it, all that export it, and what it stands for."""

    name: str
    module: str
    exporters: tuple[str, ...]
    value: Any

    @property
    def page(self) -> str:
        """The page of the name, from the folder of the API."""
        path = f"names/{self.module}.{self.name}"
        # file systems without upper case have one file for `recipe` and `Recipe`
        exported = vars(importlib.import_module(self.module))
        is_twice = self.name.islower() and self.name.title() in exported
        return f"{path}-function" if is_twice else path

    @property
    def sentence(self) -> str:
        """The first sentence of its description; nothing for a constant, which has none of its own."""
        if not (inspect.isclass(self.value) or inspect.isroutine(self.value)):
            return ""
        return (inspect.getdoc(self.value) or "").split("\n\n")[0].replace("\n", " ")


@cache
def public_modules() -> dict[str, str]:
    """Every public module with the first sentence of its description: the packages with names, and single modules."""
    packages = [
        info.name
        for info in pkgutil.walk_packages(manyformer.__path__, "manyformer.")
        if info.ispkg and hasattr(importlib.import_module(info.name), "__all__")
    ]
    names = ["manyformer", *sorted([*packages, *(f"manyformer.{name}" for name in SINGLE_MODULES)])]
    return {name: _first_paragraph(importlib.import_module(name)) for name in names}


def _first_paragraph(value: Any) -> str:
    return (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ")


def exported_names(module: str) -> dict[str, Any]:
    """The public names of a module: those of `__all__`, or of a single module what it defines itself."""
    loaded = importlib.import_module(module)
    if hasattr(loaded, "__all__"):
        names = [name for name in loaded.__all__ if not name.startswith("_")]
    else:
        names = [name for name, value in vars(loaded).items() if _is_own(name, value, module)]
    return {name: getattr(loaded, name) for name in names}


def _is_own(name: str, value: Any, module: str) -> bool:
    is_defined = inspect.isclass(value) or inspect.isfunction(value)
    return is_defined and value.__module__ == module and not name.startswith("_")


@cache
def public_names() -> tuple[PublicName, ...]:
    """Every public name once, under the first module that exports it."""
    exporters: dict[tuple[str, int], list[str]] = {}
    values: dict[tuple[str, int], Any] = {}
    for module in public_modules():
        for name, value in exported_names(module).items():
            exporters.setdefault((name, id(value)), []).append(module)
            values[name, id(value)] = value
    return tuple(PublicName(key[0], modules[0], tuple(modules), values[key]) for key, modules in exporters.items())


def api_pages(docs: Path) -> dict[str, str]:
    """The list of the modules, a page for each, and a page for each name."""
    modules = public_modules()
    rows = [(f"[{name}]({name}.rst)", sentence) for name, sentence in modules.items()]
    index = ["# API", "", "Every public name: those that `manyformer` and its packages export.", ""]
    index += [*markdown_table(("module", "contents"), rows), "", "```{toctree}", ":hidden:", "", *modules, "```"]
    pages = {"api/index.md": "\n".join(index) + "\n"}
    names = public_names()
    for module in modules:
        exported = [name for name in names if module in name.exporters]
        pages[f"api/{module}.rst"] = "\n".join(_module_page(module, exported)) + "\n"
    mentions = pages_by_name(docs, names)
    for name in names:
        pages[f"api/{name.page}.rst"] = "\n".join(_name_page(name, mentions[name.page])) + "\n"
    return pages


def _module_page(module: str, names: list[PublicName]) -> Iterator[str]:
    yield from (module, "=" * len(module), "", f".. automodule:: {module}", "")
    yield from (".. list-table::", "   :widths: 30 70", "")
    for name in sorted(names, key=lambda name: name.name.lower()):
        yield f"   * - :doc:`{name.name} <{name.page}>`"
        yield f"     - {escape(name.sentence)}"


def _name_page(name: PublicName, mentions: Mapping[str, str]) -> Iterator[str]:
    """A page outside of the navigation, which would have hundreds of entries; it links to its module."""
    # the same name of several modules, such as `build`, needs the module to be found
    yield from (":orphan:", "", name.name, "=" * len(name.name), "")
    links = [f":doc:`{module} <../{module}>`" for module in name.exporters]
    example = f"``from {name.module} import {name.name}``"
    yield f"{example}. In {', '.join(links)}; :doc:`all modules <../index>`, :ref:`index <genindex>`."
    yield ""
    path = f"{name.module}.{name.name}"
    if inspect.isclass(name.value):
        yield from (f".. autoclass:: {path}", "   :members:", "   :show-inheritance:", "")
    elif inspect.isroutine(name.value):
        # a package may have a function of the name of one of its modules, which is indexed
        yield from (f".. autofunction:: {path}", *["   :no-index:"] * (path in public_modules()), "")
        yield from _unpacked_options(name.value)
    elif isinstance(name.value, typing.TypeVar):
        yield from (f".. py:data:: {path}", "", f"   A type variable: {escape(str(name.value.__bound__))}", "")
    else:
        # its description stands where it is assigned
        yield from (f".. autodata:: {defining_module(name.module, name.name)}.{name.name}", "   :no-value:", "")
    if mentions:
        yield "Pages that speak of it: " + ", ".join(f":doc:`{title} </{page}>`" for page, title in mentions.items())


def _unpacked_options(function: Any) -> Iterator[str]:
    """A table of the keywords that a function takes as `**options: Unpack[...]`."""
    for annotation in getattr(function, "__annotations__", {}).values():
        if typing.get_origin(annotation) is not typing.Unpack:
            continue
        (options,) = typing.get_args(annotation)
        yield from (f"Keywords of ``{options.__name__}``:", "", ".. list-table::", "   :widths: 25 75", "")
        for name, described in typing.get_type_hints(options, include_extras=True).items():
            yield from (f"   * - ``{name}``", f"     - {escape(str(described.__metadata__[-1]))}")
        yield ""


def escape(text: str) -> str:
    """Markdown of a docstring as reStructuredText, in which nothing but code has a meaning."""
    parts = re.split(r"(`[^`]+`)", text)
    code = [f"`{part}`\\ " if number % 2 else re.sub(r"([\\*|_`])", r"\\\1", part) for number, part in enumerate(parts)]
    return "".join(code)


def defining_module(module: str, name: str) -> str:
    """The module whose code assigns a name that a package imports."""
    loaded = importlib.import_module(module)
    for node in ast.walk(ast.parse(inspect.getsource(loaded))):
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        if name in {alias.asname or alias.name for alias in node.names}:
            return defining_module(node.module, name)
    return module


def pages_by_name(docs: Path, names: tuple[PublicName, ...]) -> dict[str, dict[str, str]]:
    """For the page of each name the written pages that have it in code, with their titles."""
    codes = {page: "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.S)) for page, text in written_pages(docs)}
    words = {page: set(re.findall(r"(?:mf\.)?\w+", code)) for page, code in codes.items()}
    titles = {page: text.split("# ", 1)[1].split("\n", 1)[0].strip("` ") for page, text in written_pages(docs)}
    found: dict[str, dict[str, str]] = {}
    for name in names:
        spelled = {f"mf.{name.name}"} if name.module == "manyformer" else set[str]()
        # a word such as `build` or `train` may mean anything
        if is_telling(name.name):
            spelled.add(name.name)
        pages = [page for page in words if words[page] & spelled]
        found[name.page] = {page: titles[page] for page in pages[:MAX_MENTIONS]}
    return found


def is_telling(name: str) -> bool:
    """Whether a name is a word of this library alone."""
    return name.lower() != name or "_" in name


def written_pages(docs: Path) -> Iterator[tuple[str, str]]:
    """The pages that are not made from the code, by their names for links, with their texts."""
    for path in sorted(docs.rglob("*.md")):
        page = path.relative_to(docs).with_suffix("").as_posix()
        text = path.read_text(encoding="utf-8")
        if not page.startswith(("generated/", "_build/", "recipes", "OUT/")) and re.search(r"^# ", text, re.M):
            yield page, text
