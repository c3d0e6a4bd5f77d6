"""The configuration against what really ships: every recipe and every run file."""

from pathlib import Path

import pytest

from manyformer.base.keyword_checks import check_value
from manyformer.config import RunConfig, dump_run, load_run, shipped_runs
from manyformer.recipes import RECIPES, get_recipe
from manyformer.training.run_folder import recipe_lookup


def load(target: str | Path, *overrides: str) -> RunConfig:
    return load_run(target, overrides, recipes=recipe_lookup())


@pytest.mark.thinned(3)
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
        assert check_value(parameter.default, parameter.annotation) == (parameter.default, ""), keyword


def test_every_shipped_run_is_valid() -> None:
    for name in shipped_runs():
        assert load(name).recipe in RECIPES


def test_held_out_files_of_a_shipped_run_do_not_judge_other_data(tmp_path: Path) -> None:
    shipped = load("tag/relations")
    assert (shipped.data.valid, shipped.data.test) == ("en_ewt-ud-dev.conllu", "en_ewt-ud-test.conllu")
    other = load("tag/relations", "data.path=mine.conllu")
    assert (other.data.valid, other.data.test) == (0.1, None)
    named = load("tag/relations", "data.path=mine.conllu", "data.valid=dev.conllu")
    assert (named.data.valid, named.data.test) == ("dev.conllu", None)
    # other settings of the data leave them, and so does a file of one's own
    assert load("tag/relations", "data.label=upos").data.test == "en_ewt-ud-test.conllu"
    (tmp_path / "mine.yaml").write_text("extends: tag/relations\ndata: {path: mine.conllu, valid: dev.conllu}\n")
    mine = load(tmp_path / "mine.yaml", "data.path=half.conllu")
    assert (mine.data.valid, mine.data.test) == ("dev.conllu", None)
