"""What checks other people's models needs torch and NumPy alone, so that it can be a package of its own."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import manyformer as mf

SOURCES = Path(mf.__file__).parents[1]
CONTRACTS = "manyformer.analysis.contracts"
PLUGIN = f"{CONTRACTS}.pytest_plugin"

NEEDED_PACKAGES = {"numpy", "torch"}

NEEDED_MODULES = {
    "manyformer.base",
    "manyformer.base.errors",
    "manyformer.base.files.json_text",
    "manyformer.base.files.text_tables",
    "manyformer.base.lazy_names",
    "manyformer.base.libraries",
    "manyformer.nn.model_inputs",
    "manyformer.nn.runtime.torch_internals",
    "manyformer.nn.runtime.training_hooks",
}
"""The modules outside of the contracts that these may import: small ones, each of which was looked at."""


def source_of(module: str) -> Path | None:
    path = SOURCES.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def module_level(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that run when a module is imported."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from module_level(node.orelse)
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef):
            yield from module_level([child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)])
            for handler in getattr(node, "handlers", []):
                yield from module_level(handler.body)


def imported_modules(module: str) -> set[str]:
    source = source_of(module)
    assert source is not None, module
    names = set()
    for node in module_level(ast.parse(source.read_text(encoding="utf-8")).body):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        else:
            full_names = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if source_of(name) else str(node.module) for name in full_names}
    return names


def closure(modules: set[str]) -> set[str]:
    reached: set[str] = set()
    todo = set(modules)
    while todo:
        module = todo.pop()
        reached.add(module)
        if module.split(".")[0] == "manyformer":
            todo |= imported_modules(module) - reached
    return reached


def packages_among(modules: set[str]) -> set[str]:
    """The packages that must be installed for these modules."""
    return {name.split(".")[0] for name in modules} - {"manyformer"} - set(sys.stdlib_module_names)


def test_contracts_need_torch_and_numpy_alone() -> None:
    modules = {f"{CONTRACTS}.{file.stem}" for file in (SOURCES / "manyformer/analysis/contracts").glob("[!_]*.py")}
    reached = closure({CONTRACTS, *modules} - {PLUGIN})
    assert packages_among(reached) == NEEDED_PACKAGES
    outside = {name for name in reached if name.startswith("manyformer.") and not name.startswith(CONTRACTS)}
    assert outside <= NEEDED_MODULES


def test_every_start_of_pytest_waits_for_pytest_alone() -> None:
    assert packages_among(closure({PLUGIN, "manyformer", "manyformer.analysis", CONTRACTS})) == {"pytest"}
