"""Keywords of recipes: every one has a meaning, shared ones are written once, and bounds hold in both places."""

import ast
import inspect
from collections import defaultdict
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, Unpack

import pytest
from annotated_types import Ge, Gt, Lt

import manyformer as mf
from manyformer.config import describe_keywords
from manyformer.config.keywords import check_keyword
from manyformer.errors import UserError
from manyformer.models.with_early_exit import EarlyExitConfig
from manyformer.recipes import RECIPES
from manyformer.recipes.keywords import (
    COMMON_KEYWORDS,
    Default,
    PositiveSize,
    check_keyword_value,
    keyword_annotation,
    keyword_signature,
)

FOLDER = Path(inspect.getfile(mf)).parent / "recipes"


@pytest.mark.parametrize("name", RECIPES)
def test_every_keyword_has_a_meaning(name: str) -> None:
    assert not [keyword.name for keyword in describe_keywords(RECIPES[name].signature) if not keyword.meaning]


def test_a_meaning_is_written_once() -> None:
    """A text that two keywords share is that of an alias, not a copy."""
    written: dict[str, int] = defaultdict(int)
    for file in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Annotated":
                for item in ast.walk(node.slice):
                    if isinstance(item, ast.Constant) and isinstance(item.value, str) and " " in item.value:
                        written[item.value] += 1
    assert not [text for text, times in written.items() if times > 1]


def test_common_keywords_are_written_as_plain_types() -> None:
    assert keyword_annotation("dim", int) == Annotated[int, Ge(1), "width of the residual stream"]
    assert keyword_annotation("dim", Annotated[int, "another meaning"]) == Annotated[int, "another meaning"]
    assert keyword_annotation("unknown", int) is int
    assert len(COMMON_KEYWORDS) == 11


BOUNDED = Annotated[Annotated[int, Ge(1)] | None, "a number"]
SHARE = Annotated[float, Gt(0), Lt(1), "a share"]


@pytest.mark.parametrize(
    ("value", "annotation", "message"),
    [
        (0, BOUNDED, r"^x \(0\) must be at least 1$"),
        (1.0, SHARE, r"^x \(1.0\) must be above 0 and below 1$"),
        (float("nan"), SHARE, r"^x \(nan\) must be above 0 and below 1$"),
        ("c", Annotated[Literal["a", "b"], "a name"], r"^x \('c'\) must be one of a, b$"),
    ],
)
def test_values_out_of_bounds_are_refused(value: Any, annotation: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_keyword_value("x", value, annotation)


def test_values_within_bounds_are_taken() -> None:
    for value, annotation in ((1, BOUNDED), (None, BOUNDED), (0.5, SHARE), ("a", Literal["a"]), ((0.1, 2.0), SHARE)):
        check_keyword_value("x", value, annotation)


def test_run_files_meet_the_same_bounds() -> None:
    signature = RECIPES["memorizing-transformer"].signature
    for name, value, problem in (
        ("ff_dim", 0, "must be a whole number >= 1 or null, got 0"),
        ("gate", 1.0, "must be a number > 0 and < 1, got 1.0"),
        ("combine", "sum", "'sum' is not one of gate, joint"),
    ):
        assert check_keyword(name, value, signature, []) == (value, problem)
        with pytest.raises(UserError):
            mf.build("memorizing-transformer", **{name: value})
    assert check_keyword("knn_memory_size", None, signature, []) == (None, "")


class Options(TypedDict, total=False):
    """A record of keywords."""

    dropout: Annotated[float, Default(0.5)]
    slots: Annotated[PositiveSize, "number of slots", Default(3)]


def function_with_record(dim: int = 8, **options: Unpack[Options]) -> None: ...


def test_records_are_expanded_into_the_signature() -> None:
    parameters = keyword_signature(function_with_record).parameters
    assert {name: parameter.default for name, parameter in parameters.items()} == {"dim": 8, "dropout": 0.5, "slots": 3}
    assert parameters["slots"].annotation == Annotated[int, Ge(1), "number of slots"]
    assert parameters["dropout"].annotation == Annotated[float, Ge(0), Lt(1), "dropout probability"]


@pytest.mark.parametrize("name", ["early-exit-lm", "early-exit-seq2seq"])
def test_early_exit_has_the_defaults_of_its_configuration(name: str) -> None:
    parameters = RECIPES[name].signature.parameters
    for field in fields(EarlyExitConfig):
        assert parameters[field.name].default == field.default, field.name


def test_the_defaults_of_a_record_are_in_the_spec() -> None:
    model = mf.build("universal-transformer-lm", vocab=11, dim=8, depth=2, heads=2, ponder_cost=0.25)
    assert model.spec.keywords["halting_bias"] == 1.0
    assert model.spec.keywords["ponder_cost"] == 0.25
