"""Tests can fail, and their names say what is broken: each asserts a value, and no name is a mere word of speech."""

import ast
import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent
SELF = Path(__file__)

SAYS_NOTHING = {"made", "told", "up", "go", "want", "got"}
"""Names that do not say what a variable holds."""

UNTITLED = ("test_what_cannot_be_is_refused", "test_what_cannot_be")
"""Titles of tests that do not say what is refused."""

RAISING = {"raises", "warns", "fail"}
SHAPES = {"shape", "dtype", "ndim", "size", "dim", "numel"}
FINITE = {"isfinite", "isnan", "isinf"}
REDUCING = {"all", "any", "bool", "item"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def trees() -> dict[Path, ast.Module]:
    return {file: ast.parse(file.read_text(encoding="utf-8")) for file in sorted(ROOT.rglob("*.py"))}


def called_name(call: ast.Call) -> str:
    """The last part of what is called: "assert_close" of `torch.testing.assert_close(x, y)`."""
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def assertions(node: ast.AST, helpers: set[str]) -> Iterator[ast.AST]:
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
    return {node.name: node for node in ast.walk(tree) if isinstance(node, Function)}


def imported_names(tree: ast.Module) -> set[str]:
    return {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}


def asserting_helpers(tree: ast.Module, shared: set[str]) -> set[str]:
    """The functions of a module that assert, by themselves or by calling another, and those of `shared` it imports."""
    helpers = shared & imported_names(tree)
    own = functions(tree)
    while more := {name for name, node in own.items() if name not in helpers and any(assertions(node, helpers))}:
        helpers |= more
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
    """Whether a condition is about shapes, types or finite numbers alone, which wrong numbers have as well."""
    match condition:
        case ast.BoolOp(values=values):
            return all(says_little(value) for value in values)
        case ast.UnaryOp(operand=operand):
            return says_little(operand)
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


def is_toothless(test: Function, helpers: set[str]) -> bool:
    """Whether a test asserts nothing, or shapes, types and finite numbers alone."""
    return all(isinstance(part, ast.Assert) and says_little(part.test) for part in assertions(test, helpers))


def bound_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def titled_tests(file: Path) -> Iterator[Function]:
    if file.name.startswith("test_"):
        for name, node in functions(trees()[file]).items():
            if name.startswith("test_"):
                yield node


def test_every_test_asserts_a_value() -> None:
    toothless = []
    for file, tree in trees().items():
        helpers = asserting_helpers(tree, set(shared_helpers()))
        toothless += [
            f"{file.relative_to(ROOT)}:{test.lineno} {test.name}"
            for test in titled_tests(file)
            if is_toothless(test, helpers)
        ]
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
        f"{file.relative_to(ROOT)}:{test.lineno}"
        for file in trees()
        for test in titled_tests(file)
        if test.name in UNTITLED
    ]
    assert untitled == []
