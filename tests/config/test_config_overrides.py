"""The command line: three spellings, dashes, YAML values, bare model keywords."""

from pathlib import Path
from typing import Any

import pytest
from stand_in_recipes import load, refused, signature_of

from manyformer.base.errors import UserErrors
from manyformer.config import RecipeLookup, load_run


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "words",
    [
        ["optim.weight_decay=0.5"],
        ["--optim.weight_decay", "0.5"],
        ["--optim.weight_decay=0.5"],
        ["--optim.weight-decay", "5e-1"],
        ["optim.weight-decay=.5"],
        ["optim={weight_decay: 0.5}"],
        ["optim.weight_decay=0.1", "optim.weight_decay=0.5"],
    ],
)
def test_all_spellings_mean_the_same(words: list[str]) -> None:
    assert load("lm", *words) == load("lm", "optim.weight_decay=0.5")
    assert load("lm", *words).optim.weight_decay == 0.5


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("-", "-"),
        ("a: b", "a: b"),
        ("*.txt", "*.txt"),
        ("hf:name", "hf:name"),
        ("[a, b]", ("a", "b")),
        ("'3'", "3"),
        ('"x"', "x"),
        ("@x", "@x"),
        ("dir=3/x", "dir=3/x"),
        ("# x", "# x"),
    ],
)
def test_values_are_yaml_and_other_words_are_themselves(word: str, value: Any) -> None:
    assert load("lm", f"data.path={word}").data.path == value
    assert load("lm", "--data.path", word).data.path == value


def test_bare_model_keywords() -> None:
    run = load("lm", "depth=7", "--dropout", "0", "--norm-order=post", "ff_dim=null", "widths=[3]", "dim=1e2")
    assert run.model == {"depth": 7, "dropout": 0.0, "norm_order": "post", "ff_dim": None, "widths": [3], "dim": 100}
    assert isinstance(run.model["dropout"], float)


def test_a_bare_keyword_that_could_mean_two_settings() -> None:
    assert refused("lm", "vocab=300") == ["--vocab 300: could mean model.vocab or data.vocab; write one of them"]
    assert refused("seq2seq", "max_length=30") == [
        "--max_length 30: could mean model.max_length or data.max_length; write one of them"
    ]
    # Rows of running text have a length, so here only the model has a max_length.
    assert load("lm", "max_length=30").model == {"max_length": 30}
    # And the width of noam's formula is a setting only where noam is chosen.
    assert load("fourier", "width=30").model == {"width": 30}
    assert refused("fourier", "width=30", "schedule={name: noam, width: 3}") == [
        "--width 30: could mean model.width or schedule.width; write one of them"
    ]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["lr=1e-4"], "--lr 1e-4: no such setting; did you mean optim.lr?"),
        (["steps=10"], "--steps 10: no such setting; did you mean limits.steps?"),
        (["--d-model", "8"], "--d-model 8: no such setting; did you mean model.dim?"),
        (["detph=8"], "--detph 8: no such setting; did you mean model.depth?"),
        (["modle.depth=8"], "--modle.depth 8: no such setting; did you mean model.depth?"),
        (["model.d-pth=8"], "--model.d-pth 8: no such setting; did you mean model.depth?"),
        (["seed.x=8"], "--seed.x 8: no such setting; did you mean seed?"),
        (["model.depth.x=8"], "--model.depth.x 8: no such setting; did you mean model.depth?"),
        (["optim.betas=3"], "--optim.betas 3: must be two numbers from 0 up to 1, such as [0.9, 0.98], got 3"),
        (["depth=x"], "--depth x: model.depth: must be a whole number >= 1, got 'x'"),
        (["optim={lr: x}"], "--optim '{lr: x}': optim.lr: must be a number, got 'x'"),
        (["data=[1"], "--data [1: this list is not closed with ]"),
        (["optim=adam"], "--optim adam: must be a mapping of settings, got 'adam'; did you mean optim.name?"),
        (["depth"], "depth: is no setting; write key=value or --key value"),
        (["--compile"], "--compile: needs a value, as in `--compile true`"),
        (["--compile", "--seed", "1"], "--compile: needs a value, as in `--compile true`"),
        (["=3"], "=3: is no setting; write key=value or --key value"),
        (["out="], ""),
        (["recipe=brt"], "--recipe brt: there is no recipe 'brt'; did you mean bert?"),
        (["data.path="], "--data.path '': must be a path or a list of paths, got null"),
        (["extends=x"], "--extends x: no such setting"),
    ],
)
def test_a_wrong_word_gets_the_nearest_right_one(words: list[str], line: str) -> None:
    if not line:
        assert load("lm", *words).out == "runs/lm"
        return
    actual = refused("lm", *words)
    assert len(actual) == 1
    assert actual[0].startswith(line)


def test_negative_values_are_no_options() -> None:
    assert refused("lm", "--seed", "-1") == ["--seed -1: must be at least 0, got -1"]


def test_only_the_chosen_member_is_suggested() -> None:
    assert refused("lm", "optim.name=adam", "optim.weight_deca=1")[0].startswith(
        "--optim.weight_deca 1: no such setting; known in optim: betas, eps, groups, l2, layer_decay, lr, max_grad_norm"
    )
    assert refused("lm", "optim.weight_deca=1") == [
        "--optim.weight_deca 1: no such setting; did you mean optim.weight_decay?"
    ]


def test_choosing_another_member_keeps_what_the_command_line_says_of_it() -> None:
    Path("base.yaml").write_text("recipe: lm\noptim: {name: adamw, lr: 0.5, weight_decay: 0.2}\n")
    run = load("base.yaml", "optim.eps=0.25", "optim.name=adam")
    assert (run.optim.name, run.optim.lr, run.optim.eps) == ("adam", 1e-3, 0.25)


def test_another_recipe_keeps_the_model_keywords_it_knows() -> None:
    Path("base.yaml").write_text("recipe: lm\nmodel: {depth: 3, vocab: 9}\n")
    assert load("base.yaml", "recipe=bert").model == {"depth": 3, "vocab": 9}
    assert load("base.yaml", "recipe=fourier", "width=8").model == {"vocab": 9, "width": 8}
    Path("other.yaml").write_text("extends: base.yaml\nrecipe: fourier\nmodel: {width: 8}\n")
    assert load("other.yaml").model == {"vocab": 9, "width": 8}


def test_a_model_keyword_that_no_recipe_of_the_run_has_is_refused() -> None:
    Path("base.yaml").write_text("recipe: lm\nmodel: {dpeth: 3}\n")
    unknown = "base.yaml:2:9: model.dpeth: no such setting; known in model: vocab, width"
    assert refused("base.yaml", "recipe=fourier") == [unknown]
    Path("base.yaml").write_text("recipe: fourier\nmodel: {depth: 3}\n")
    assert refused("base.yaml") == ["base.yaml:2:9: model.depth: no such setting; known in model: vocab, width"]
    assert refused("lm", "recipe=fourier", "depth=3")[0].startswith("--depth 3: ")


def test_overrides_from_python_are_a_mapping() -> None:
    given = {"depth": 3, "optim.lr": 0.5, "trackers": ["tensorboard"], "data.path": Path("x") / "y"}
    run = load_run("lm", given, recipes=RecipeLookup(signature_of))
    assert run.data.path == "x/y"
    assert (run.model, run.optim.lr, run.trackers) == ({"depth": 3}, 0.5, ("tensorboard",))


def test_what_no_command_line_has_is_refused() -> None:
    with pytest.raises(UserErrors, match="301 settings are given on the command line, and at most 300 can be"):
        load("lm", *(f"k{number}=1" for number in range(301)))
    with pytest.raises(UserErrors, match=r"--data\.path: holds bytes that are not UTF-8; rename the file"):
        load("lm", "data.path=\udcff")
