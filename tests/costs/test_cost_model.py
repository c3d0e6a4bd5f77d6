"""What the constants of the machine are, and that there are no others."""

import ast
import dataclasses
import itertools
import re
from datetime import date
from pathlib import Path

import pytest

import manyformer as mf
from manyformer.costs import cost_model

ROOT = Path(mf.__file__).parent
FIELDS = dataclasses.fields(cost_model.CostModel)

NO_COSTS = {
    "BLANK",
    "BUCKET_ID_BITS",
    "CHUNKS_PER_BUCKET",
    "EMPTY_KEY_MARK",
    "EMPTY_QUERY_MARK",
    "EPSILON",
    "FACTORS",
    "GOLDEN",
    "GROUPED_ALIGNMENT",
    "GROUPED_CAPABILITY",
    "HOPPER",
    "INTERVAL_END",
    "LLOYD_ITERATIONS",
    "LOW_PRECISION_PARTS",
    "MAX_KEY_DIM",
    "NO_EXPERT",
    "NO_PATH",
    "MASK_BIAS",
    "MAX_BUCKETS",
    "MAX_EXPONENT",
    "MAX_FACTOR",
    "MAX_LOW_PRECISION",
    "MAX_SUM",
    "MIN_FLEX_WIDTH",
    "MIN_SHARE",
    "NEGLIGIBLE",
    "MIN_BLOCKS_SEEN",
    "NO_SEGMENT",
    "ORIGINS",
    "SCORE_KERNEL_OPTIONS",
    "UNREACHED",
    "UNUSED_SEGMENT",
}
"""Numbers of ops and kernels that define results, encode values or bound torch, on every machine alike."""


def test_each_cost_has_a_unit_a_date_and_a_description() -> None:
    (body,) = (
        node.body for node in ast.parse(Path(cost_model.__file__).read_text()).body if isinstance(node, ast.ClassDef)
    )
    described = {
        field.target.id
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr)
    }
    assert described == {field.name for field in FIELDS}
    for field in FIELDS:
        assert field.metadata["unit"]
        assert date.fromisoformat(field.metadata["date"])


def test_each_cost_is_used_by_one_module() -> None:
    sources = [path.read_text(encoding="utf-8") for path in ROOT.rglob("*.py") if path.name != "cost_model.py"]
    for field in FIELDS:
        use = re.compile(rf"\b(COSTS|costs|tuned_costs\(\)\[0\])\.{field.name}\b")
        assert sum(bool(use.search(source)) for source in sources) == 1, field.name


def test_costs_do_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        cost_model.COSTS.lse_block = 1  # type: ignore[misc]


def test_ops_and_kernels_hold_no_constant_of_the_machine() -> None:
    numbers = set()
    for path in (*ROOT.glob("ops/*.py"), *ROOT.glob("kernels/**/*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and any(isinstance(part, ast.Constant) for part in ast.walk(node.value)):
                targets = [name for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)]
                is_number = any(
                    isinstance(part, ast.Constant) and type(part.value) in (int, float) for part in ast.walk(node.value)
                )
                if is_number and "COSTS" not in ast.unparse(node.value):
                    numbers |= {target.id for target in targets if target.id.isupper()}
    assert numbers <= NO_COSTS, sorted(numbers - NO_COSTS)
