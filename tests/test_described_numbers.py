"""Numbers that decide how something is computed stand beside their user, each with what it is."""

import ast
import itertools
from pathlib import Path

import pytest

import manyformer as mf

ROOT = Path(mf.__file__).parent
FILES = [
    path
    for folder in ("masks", "positions", "ops", "softmax", "sparse", "linear", "clustered", "low_rank", "kernels")
    for path in sorted((ROOT / "nn" / folder).rglob("*.py"))
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_each_number_of_a_module_is_described(path: Path) -> None:
    body: list[ast.stmt | None] = [*ast.parse(path.read_text(encoding="utf-8")).body, None]
    for statement, following in itertools.pairwise(body):
        if not isinstance(statement, ast.Assign):
            continue
        parts = list(ast.walk(statement.value))
        is_table_of_code = any(isinstance(part, ast.Lambda) for part in parts)
        is_number = any(isinstance(part, ast.Constant) and type(part.value) in (int, float) for part in parts)
        if is_number and not is_table_of_code:
            described = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            assert described, ast.unparse(statement)
