"""What a run takes from the model that `init_from` names, and what it does not."""

from pathlib import Path

import pytest
from stand_in_recipes import FUNCTIONS, TASKS, signature_of

from manyformer.base.errors import UserErrors
from manyformer.config import InitialModel, RecipeLookup, RunConfig, dump_run, load_run

KEYWORDS = {"vocab": 99, "dim": 32, "depth": 2, "dropout": 0.1, "norm_order": "post", "max_length": 512}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def describe(path: str, out: str) -> InitialModel | None:
    return InitialModel(path, "bert", KEYWORDS, True) if path == "saved" else None


def load(target: str | Path, *overrides: str) -> RunConfig:
    lookup = RecipeLookup(signature_of, TASKS.__getitem__, FUNCTIONS, saved_model=describe)
    return load_run(target, overrides, recipes=lookup)


def test_keywords_and_tokenizer_are_those_of_the_saved_model() -> None:
    run = load("bert", "init_from=saved", "dim=48", "dropout=0.0")
    # defaults (depth) need no mention, and the data decides the vocabulary
    assert run.model == {"dim": 48, "dropout": 0.0, "norm_order": "post", "max_length": 512}
    assert getattr(run.data, "tokenizer_of", None) == "saved"


def test_nothing_is_taken_where_there_is_nothing_or_by_another_recipe() -> None:
    for name, source in (("bert", "elsewhere"), ("lm", "saved")):
        run = load(name, f"init_from={source}")
        assert run.model == {}
    assert load("bert").data == load("bert", "init_from=elsewhere").data
    assert getattr(load("lm", "init_from=saved").data, "tokenizer_of", None) == "saved"


@pytest.mark.parametrize("setting", ["data.tokenizer=char", "data.tokenizer_of=another"])
def test_another_tokenizer_is_left_as_it_is_set(setting: str) -> None:
    assert getattr(load("bert", "init_from=saved", setting).data, "tokenizer_of", None) != "saved"


def test_the_recipe_may_be_left_out(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("init_from: saved\nlimits: {steps: 5}\n")
    run = load(file)
    assert run.recipe == "bert"
    assert run.model["dim"] == 32
    file.write_text("init_from: elsewhere\n")
    with pytest.raises(UserErrors, match="recipe: is missing"):
        load(file)


def test_a_recorded_run_is_complete(tmp_path: Path) -> None:
    first = load("bert", "init_from=saved", "dim=48")
    recorded = tmp_path / "run.yaml"
    recorded.write_text(dump_run(first))
    assert load(recorded) == first
    # one that a saved model has nothing to do with stays as it is, too, unless another one is named
    recorded.write_text(dump_run(load("bert", "init_from=elsewhere").model_copy(update={"init_from": "saved"})))
    assert load(recorded).model == {}
    assert load(recorded, "init_from=saved").model["dim"] == 32
