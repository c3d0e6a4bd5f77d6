"""The configuration against what really ships: every recipe and every run file."""

from pathlib import Path

import pytest

from manyformer.config import RunConfig, dump_run, load_run, shipped_runs
from manyformer.config.keywords import check_keyword
from manyformer.recipes import RECIPES, get_recipe
from manyformer.train.run_folder import recipe_lookup


def load(target: str | Path, *overrides: str) -> RunConfig:
    return load_run(target, overrides, recipes=recipe_lookup())


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_recipe_can_be_trained_by_its_name(name: str, tmp_path: Path) -> None:
    pathless = {"language-model", "masked-lm", "translation", "policy"}
    needed = [] if get_recipe(name).card.task.name in pathless else ["data.path=x.tsv"]
    run = load(name, *needed)
    assert run.out == f"runs/{name}"
    (tmp_path / "run.yaml").write_text(dump_run(run))
    assert load(tmp_path) == run


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_keyword_takes_its_own_default(name: str) -> None:
    signature = get_recipe(name).signature
    for keyword, parameter in signature.parameters.items():
        default = list(parameter.default) if isinstance(parameter.default, tuple) else parameter.default
        assert check_keyword(keyword, default, signature, []) == (default, "")


def test_every_shipped_run_is_valid() -> None:
    for name in shipped_runs():
        assert load(name).recipe in RECIPES
