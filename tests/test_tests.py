"""Tests can fail, and their names say what is broken: each asserts a value, and no name is a mere word of speech."""

import ast
import functools
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from sources import trees_below

ROOT = Path(__file__).parent

SAYS_NOTHING = {"made", "told", "up", "go", "want", "got"}
"""Names that do not say what a variable holds."""

UNTITLED = ("test_what_cannot_be_is_refused", "test_what_cannot_be")
"""Titles of tests that do not say what is refused."""

RAISING = {"raises", "warns", "fail"}
SHAPES = {"shape", "dtype", "ndim", "size", "dim", "numel"}
FINITE = {"isfinite", "isnan", "isinf"}
REDUCING = {"all", "any", "bool", "item"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def trees() -> dict[Path, ast.Module]:
    return trees_below(ROOT)


def called_name(call: ast.Call) -> str:
    """The last part of what is called: "assert_close" of `torch.testing.assert_close(x, y)`."""
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def assertions(node: ast.AST, helpers: Collection[str]) -> Iterator[ast.AST]:
    """What can make a test fail: `assert`, `pytest.raises`, functions called assert_..., helpers with one of them."""
    for part in ast.walk(node):
        if isinstance(part, ast.Assert):
            yield part
        elif isinstance(part, ast.Call):
            name = called_name(part)
            is_helper = isinstance(part.func, ast.Name) and name in helpers
            if name in RAISING or name.startswith("assert") or is_helper:
                yield part


def functions(tree: ast.Module) -> dict[str, Function]:
    """The functions of a module and the methods of its classes, by name."""
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    return {node.name: node for body in bodies for node in body if isinstance(node, Function)}


def asserting_helpers(tree: ast.Module, shared: Collection[str]) -> set[str]:
    """The functions of a module that assert, by themselves or by calling another, and those of `shared` it imports."""
    imported = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    helpers = imported.intersection(shared)
    calls: dict[str, set[str]] = {}
    for name, node in functions(tree).items():
        if any(assertions(node, ())):
            helpers.add(name)
        else:
            calls[name] = {called_name(part) for part in ast.walk(node) if isinstance(part, ast.Call)}
    while callers := {name for name, called in calls.items() if called & helpers and name not in helpers}:
        helpers |= callers
    return helpers


@functools.cache
def shared_helpers() -> frozenset[str]:
    """The functions that assert, of all modules beside the tests that hold no tests themselves."""
    helpers: set[str] = set()
    for file, tree in trees().items():
        if not file.name.startswith("test_"):
            helpers |= asserting_helpers(tree, helpers)
    return frozenset(helpers)


def says_little(condition: ast.expr) -> bool:
    """Whether a condition is about shapes, types, finite numbers or None alone, which wrong numbers satisfy as well."""
    match condition:
        case ast.BoolOp(values=values):
            return all(says_little(value) for value in values)
        case ast.UnaryOp(operand=operand):
            return says_little(operand)
        case ast.Compare(ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]):
            return True
        case ast.Compare(left=left, comparators=comparators):
            return any(is_a_shape(side) for side in (left, *comparators))
        case ast.GeneratorExp(elt=element) | ast.ListComp(elt=element):
            return says_little(element)
        case ast.Call() as call:
            name = called_name(call)
            if name in FINITE or name == "isinstance":
                return True
            parts = [call.func.value] if isinstance(call.func, ast.Attribute) else []
            return name in REDUCING and any(says_little(part) for part in [*parts, *call.args])
    return False


def is_a_shape(side: ast.expr) -> bool:
    match side:
        case ast.Attribute(attr=name):
            return name in SHAPES
        case ast.Call() as call:
            return called_name(call) in SHAPES
        case ast.Subscript(value=value):
            return is_a_shape(value)
    return False


def toothless_tests(tree: ast.Module, shared: Collection[str]) -> list[Function]:
    """The tests of a module that assert nothing, or shapes, types and finite numbers alone."""
    helpers = asserting_helpers(tree, shared)
    return [
        test
        for test in titled_tests(tree)
        if all(isinstance(part, ast.Assert) and says_little(part.test) for part in assertions(test, helpers))
    ]


def titled_tests(tree: ast.Module) -> list[Function]:
    return [node for name, node in functions(tree).items() if name.startswith("test_")]


def bound_names(tree: ast.AST) -> Iterator[str]:
    """The variables and parameters that a module binds."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def place_of(file: Path, test: Function) -> str:
    return f"{file.relative_to(ROOT)}:{test.lineno} {test.name}"


def test_every_test_asserts_a_value() -> None:
    toothless = []
    for file, tree in trees().items():
        if file.name.startswith("test_"):
            toothless += [place_of(file, test) for test in toothless_tests(tree, shared_helpers())]
    assert toothless == []


def test_names_say_what_they_hold() -> None:
    names = Counter(
        (str(file.relative_to(ROOT)), name)
        for file, tree in trees().items()
        for name in bound_names(tree)
        if name in SAYS_NOTHING
    )
    assert names == Counter()


def test_titles_say_what_is_refused() -> None:
    untitled = [
        place_of(file, test) for file, tree in trees().items() for test in titled_tests(tree) if test.name in UNTITLED
    ]
    assert untitled == []


@pytest.mark.parametrize(
    "body",
    [
        "f(x)",
        "assert f(x).shape == (2, 3)",
        "assert f(x).isfinite().all()\n    assert isinstance(f(x), list)",
        "assert all(y.isfinite().all() for y in f(x)) and f(x).size(0) == 2",
        "silent(x)",
    ],
)
def test_tests_that_cannot_fail_are_found(body: str) -> None:
    tree = ast.parse(f"def silent(x):\n    return x\n\ndef test_f(x):\n    {body}\n")
    assert [test.name for test in toothless_tests(tree, ())] == ["test_f"]


@pytest.mark.parametrize(
    "body",
    [
        "assert f(x) == 3",
        "assert f(x).shape == (2, 3)\n    assert f(x).sum() == 0",
        "torch.testing.assert_close(f(x), x)",
        "with pytest.raises(ValueError, match='x'):\n        f(x)",
        "compare(x)",
        "compare_all(x)",
        "shared(x)",
    ],
)
def test_tests_that_can_fail_are_left_alone(body: str) -> None:
    tree = ast.parse(
        "from helpers import shared\n\ndef compare(x):\n    assert x == 1\n\n"
        f"def compare_all(x):\n    compare(x)\n\ndef test_f(x):\n    {body}\n"
    )
    assert toothless_tests(tree, ["shared"]) == []
