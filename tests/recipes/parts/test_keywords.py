"""Keywords of recipes: every one has a meaning, shared ones are written once, and bounds hold in both places."""

import ast
import inspect
import json
from collections import defaultdict
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, Unpack

import numpy as np
import pytest
import torch
from annotated_types import Ge, Gt, Lt

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.base.keyword_checks import check_value
from manyformer.config import describe_keywords, load_run
from manyformer.models import ModelSpec
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.models.with_early_exit import EarlyExitConfig
from manyformer.recipes import RECIPES
from manyformer.recipes.parts.keywords import (
    COMMON_KEYWORDS,
    Default,
    PositiveSize,
    keyword_annotation,
    keyword_signature,
)
from manyformer.recipes.parts.registry import recipe, recipe_of_spec
from manyformer.training.run_folder import recipe_lookup

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
    ("value", "annotation", "problem"),
    [
        (0, BOUNDED, "must be a whole number >= 1 or null, got 0"),
        ("1", BOUNDED, "must be a whole number >= 1 or null, got '1'"),
        (True, BOUNDED, "must be a whole number >= 1 or null, got true"),
        (2**31, BOUNDED, "must be at most 2147483647, got 2147483648"),
        (1.0, SHARE, "must be a number > 0 and < 1, got 1.0"),
        (float("nan"), SHARE, "must be a number > 0 and < 1, got nan"),
        (float("inf"), float, "must be a number, got inf"),
        ("c", Annotated[Literal["a", "b"], "a name"], "'c' is not one of a, b"),
        (None, Literal["a", "b"], "null is not one of a, b"),
        ([1, "x"], tuple[int, ...], "must be a list of a whole number, got [1, 'x']"),
        (object, int, "must be a whole number, got <class 'object'>"),
    ],
)
def test_wrong_values_are_refused_with_what_would_be_right(value: Any, annotation: Any, problem: str) -> None:
    assert check_value(value, annotation)[1] == problem


@pytest.mark.parametrize(
    ("value", "annotation", "typed"),
    [
        (1, BOUNDED, 1),
        (None, BOUNDED, None),
        (1e3, BOUNDED, 1000),
        (np.int64(3), BOUNDED, 3),
        (0.5, SHARE, 0.5),
        (np.float32(0.5), SHARE, 0.5),
        (1, float, 1.0),
        ("a", Literal["a"], "a"),
        ([0.5, 1], tuple[float, ...], (0.5, 1.0)),
        ((0.5, 2.0), tuple[float, ...] | None, (0.5, 2.0)),
        ("anything", Any, "anything"),
    ],
)
def test_right_values_get_the_type_of_the_keyword(value: Any, annotation: Any, typed: Any) -> None:
    checked = check_value(value, annotation)
    assert checked == (typed, "")
    assert type(checked[0]) is type(typed)


def test_an_object_that_no_file_can_name_is_left_to_the_recipe() -> None:
    generator = torch.Generator()
    assert check_value(generator, torch.Generator) == (generator, "")


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("ff_dim", 0, "ff_dim: must be a whole number >= 1 or null, got 0"),
        ("gate", 1.0, "gate: must be a number > 0 and < 1, got 1.0"),
        ("combine", "sum", "combine: 'sum' is not one of gate, joint"),
        ("combine", None, "combine: null is not one of gate, joint"),
        ("knn_memory_size", "many", "knn_memory_size: must be a whole number >= 1 or null, got 'many'"),
        ("dim", 1 << 40, "dim: must be at most 2147483647, got 1099511627776"),
    ],
)
def test_run_files_and_python_and_saved_models_say_the_same(
    name: str, value: Any, problem: str, tmp_path: Path
) -> None:
    recipe = "memorizing-transformer"
    with pytest.raises(UserError) as in_python:
        mf.build(recipe, **{name: value})
    (tmp_path / "run.yaml").write_text(f"recipe: {recipe}\nmodel:\n  {name}: {json.dumps(value)}\n")
    with pytest.raises(UserError) as in_file:
        load_run(tmp_path / "run.yaml", recipes=recipe_lookup())
    with pytest.raises(UserError) as in_model:
        recipe_of_spec(ModelSpec(recipe, {name: value}), tmp_path)
    assert str(in_python.value) == problem
    assert str(in_file.value) == f"{tmp_path / 'run.yaml'}:3:3: model.{problem}"
    assert str(in_model.value) == f"{tmp_path / 'config.json'} is damaged: {problem}"


def test_a_recipe_that_is_called_itself_names_the_nearest_keyword() -> None:
    with pytest.raises(UserError, match=r"^transformer-lm has no keyword 'deph'; did you mean depth\?$"):
        RECIPES["transformer-lm"].build(deph=3)


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


def function_with_own_dropout(heads: int = 2, attention_dropout: float = 0.5) -> None: ...


def test_a_keyword_of_a_recipe_itself_is_no_shared_one() -> None:
    register = recipe("Own dropout", paper="", summary="", task=LANGUAGE_MODELLING, cost="")
    register(function_with_own_dropout)  # type: ignore[arg-type]
    parameters = RECIPES.pop("function-with-own-dropout").signature.parameters
    assert list(parameters) == ["heads", "attention_dropout", "removed_heads", "shared_qk_dim"]
    assert parameters["attention_dropout"].default == 0.5


@pytest.mark.parametrize("name", ["early-exit-lm", "early-exit-seq2seq"])
def test_early_exit_has_the_defaults_of_its_configuration(name: str) -> None:
    parameters = RECIPES[name].signature.parameters
    for field in fields(EarlyExitConfig):
        assert parameters[field.name].default == field.default, field.name


def test_the_defaults_of_a_record_are_in_the_spec() -> None:
    model = mf.build("universal-transformer-lm", vocab=11, dim=8, depth=2, heads=2, ponder_cost=0.25)
    assert model.spec.keywords["halting_bias"] == 1.0
    assert model.spec.keywords["ponder_cost"] == 0.25


def test_cards_of_models_show_the_lists_of_a_run_file() -> None:
    spec = ModelSpec("decision-transformer", {"dim": 16, "observation_mean": (0.5, 1.0), "pairs": ((1, 2), (3, 4))})
    assert spec.settings_list() == "- dim: 16\n- observation_mean: [0.5, 1.0]\n- pairs: [[1, 2], [3, 4]]"
