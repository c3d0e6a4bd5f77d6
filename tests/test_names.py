"""Public names are unique, and variables are technical terms: whoever searches for a name finds one thing."""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import manyformer as mf
from sources import trees_below

ROOT = Path(mf.__file__).parent


def trees() -> dict[Path, ast.Module]:
    """The syntax tree of each file by its path in the package."""
    return {file.relative_to(ROOT): tree for file, tree in trees_below(ROOT).items()}


EVERYDAY_WORDS = frozenset(
    [
        "found",
        "made",
        "one",
        "ones",
        "some",
        "other",
        "others",
        "kept",
        "each",
        "more",
        "after",
        "before",
        "there",
        "here",
        "words",
        "wanted",
        "given",
        "known",
        "told",
        "seen",
        "mine",
        "theirs",
        "own",
        "whole",
        "alike",
        "apart",
        "beside",
        "around",
        "far",
        "near",
        "again",
        "already",
        "now",
        "said",
        "what",
        "who",
        "way",
        "ways",
        "thing",
        "things",
        "spot",
        "spots",
        "few",
        "many",
        "most",
    ]
)
"""Words that do not say what a variable holds. A name of several words is never one of them."""

MAX_EVERYDAY_SHARE = 0.005

VERBS_AND_PAPERS = {"cli", "recipes"}
"""Folders whose modules are named after a command or a paper, as the module that does the work may be, too."""


def public_types(tree: ast.Module) -> Iterator[str]:
    """The classes and type aliases that a module defines, without private ones."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            alias = node.targets[0].id
            if alias[0].isupper() and not alias.isupper():
                yield alias


def bindings(tree: ast.Module) -> Iterator[str]:
    """The names of all variables and parameters, once for each place that binds them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg) and node.arg not in ("self", "cls"):
            yield node.arg


def test_public_classes_and_aliases_have_unique_names() -> None:
    files: dict[str, list[str]] = defaultdict(list)
    for file, tree in trees().items():
        for name in public_types(tree):
            files[name].append(str(file))
    assert {name: places for name, places in files.items() if len(places) > 1} == {}


def test_modules_have_unique_names() -> None:
    files: dict[str, list[Path]] = defaultdict(list)
    for file in trees():
        if file.name != "__init__.py" and file.parts[0] not in VERBS_AND_PAPERS:
            files[file.name].append(file)
    assert {name: places for name, places in files.items() if len(places) > 1} == {}


def test_variables_are_technical_terms() -> None:
    total, everyday = 0, Counter[tuple[str, str]]()
    for file, tree in trees().items():
        names = list(bindings(tree))
        total += len(names)
        everyday.update((str(file), name) for name in names if name in EVERYDAY_WORDS)
    assert everyday.total() <= MAX_EVERYDAY_SHARE * total, everyday.most_common(20)


def test_the_measure_finds_what_it_looks_for() -> None:
    tree = ast.parse(
        "class Plan: ...\nRows = list[int]\nLIMIT = 3\n\ndef f(found: int) -> None:\n    one, total = 1, 2\n"
    )
    assert list(public_types(tree)) == ["Plan", "Rows"]
    assert sorted(bindings(tree)) == ["LIMIT", "Rows", "found", "one", "total"]
