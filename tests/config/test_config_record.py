"""The record by itself: defaults, strictness, unions, conflicts between settings, and no torch."""

import json
import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from manyformer.config import (
    AdagradConfig,
    AdamConfig,
    AdamWConfig,
    CosineSchedule,
    LabelsData,
    LimitsConfig,
    NoamSchedule,
    PairsData,
    RunConfig,
    TextData,
)


def complaints(**settings: Any) -> dict[str, str]:
    """What is wrong with a run of these settings, by path without the members of unions."""
    with pytest.raises(ValidationError) as caught:
        RunConfig.model_validate({"recipe": "lm", **settings})
    return {".".join(map(str, error["loc"])): error["msg"] for error in caught.value.errors()}


def test_configuration_does_not_load_torch() -> None:
    code = "import sys, manyformer.config; print(json.dumps([m for m in sys.modules if m.split('.')[0] in heavy]))"
    heavy = ["torch", "transformers", "datasets", "matplotlib", "numpy", "jaxtyping"]
    answer = subprocess.run(
        [sys.executable, "-c", f"import json; heavy = {heavy}; {code}"], capture_output=True, text=True, check=True
    )
    assert json.loads(answer.stdout) == []


def test_a_recipe_is_all_that_a_run_needs() -> None:
    run = RunConfig(recipe="lm")
    assert run.limits == LimitsConfig(steps=2000)
    assert run.data == TextData(path="stdlib", tokenizer="byte")
    assert run.optim.lr == 1e-3
    assert run.warmup == 100


def test_adam_has_the_settings_of_the_paper() -> None:
    adam = AdamConfig()
    assert (adam.betas, adam.eps) == ((0.9, 0.98), 1e-9)
    run = RunConfig.model_validate({"recipe": "t", "schedule": {"name": "noam"}, "limits": {"steps": 100_000}})
    assert isinstance(run.schedule, NoamSchedule)
    assert (run.warmup, run.optim.lr) == (4000, None)


@pytest.mark.parametrize(
    ("schedule", "limits", "warmup"),
    [
        ({"name": "cosine"}, {"steps": 50}, 5),
        ({"name": "cosine"}, {"minutes": 1}, 100),
        ({"name": "constant", "warmup": 0}, {"steps": 50}, 0),
        ({"name": "noam"}, {"steps": 3}, 1),
        ({"name": "noam"}, {"epochs": 3}, 4000),
        ({"name": "noam", "warmup": 7}, {"steps": 10}, 7),
    ],
)
def test_warm_up_that_is_left_open_follows_the_length(schedule: Any, limits: Any, warmup: int) -> None:
    assert RunConfig.model_validate({"recipe": "lm", "schedule": schedule, "limits": limits}).warmup == warmup


def test_a_record_is_frozen_all_the_way() -> None:
    run = RunConfig(recipe="lm")
    with pytest.raises(ValidationError, match="frozen"):
        run.seed = 3
    with pytest.raises(ValidationError, match="frozen"):
        run.optim.lr = 3.0
    assert isinstance(RunConfig.model_validate({"recipe": "lm", "data": {"path": ["a", "b"]}}).data.path, tuple)


def test_the_tag_may_be_left_out() -> None:
    run = RunConfig.model_validate(
        {"recipe": "lm", "optim": {"lr": 0.1}, "schedule": {"final_ratio": 0.0}, "data": {"length": 8}}
    )
    assert run.optim == AdamWConfig(lr=0.1)
    assert run.schedule == CosineSchedule(final_ratio=0.0)
    assert run.data == TextData(length=8)


def test_defaults_that_depend_on_other_settings() -> None:
    assert RunConfig(recipe="lm", optim=AdamConfig()).optim.lr == 1e-3
    assert RunConfig(recipe="lm", optim=AdagradConfig()).optim.lr == 0.07
    assert RunConfig.model_validate({"recipe": "lm", "devices": 2}).strategy == "ddp"
    assert PairsData().vocab == 6000
    assert TextData(tokenizer="bpe").vocab == 2000
    assert TextData(tokenizer="char").vocab is None
    assert LabelsData(path="x.tsv", tokenizer="byte").vocab is None


def test_words_are_not_numbers_and_numbers_are_not_truths() -> None:
    actual = complaints(
        seed="1", activation_checkpointing="yes", batch={"tokens": True}, limits={"steps": 1.5}, optim={"lr": "0.1"}
    )
    assert set(actual) == {"seed", "activation_checkpointing", "batch.tokens", "limits.steps", "optim.adamw.lr"}
    assert RunConfig.model_validate({"recipe": "lm", "limits": {"steps": 1e5}}).limits.steps == 100_000


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"optim": {"lr": 0.0}}, "optim.adamw.lr"),
        ({"optim": {"lr": float("inf")}}, "optim.adamw.lr"),
        ({"optim": {"betas": [0.9, 1.0]}}, "optim.adamw.betas"),
        ({"optim": {"betas": [0.9]}}, "optim.adamw.betas"),
        ({"optim": {"name": "adam", "weight_decay": 0.1}}, "optim.adam.weight_decay"),
        ({"batch": {"tokens": 0}}, "batch.tokens"),
        ({"limits": {"minutes": -1}}, "limits.minutes"),
        ({"loss": {"label_smoothing": 1.0}}, "loss.label_smoothing"),
        ({"data": {"valid": 1.0}}, "data.valid"),
        ({"data": {"valid": 0}}, "data.valid"),
        ({"data": {"path": []}}, "data.path"),
        ({"data": {"path": ""}}, "data.path"),
        ({"data": {"kind": "pairs", "path": ["a", "b", "c"]}}, "data.path"),
        ({"data": {"kind": "pairs", "source": -1}}, "data.source"),
        ({"data": {"kind": "labels"}}, "data.path"),
        ({"data": {"masking": 0.0}}, "data.masking"),
        ({"trackers": ["wandbb"]}, "trackers.0"),
        ({"recipe": ""}, "recipe"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_a_wrong_setting_is_refused_where_it_is(settings: Any, path: str) -> None:
    assert set(complaints(**settings)) == {path}


@pytest.mark.parametrize(
    ("settings", "path", "word"),
    [
        ({"limits": {}}, "limits", "at least one of steps, epochs, tokens, minutes and cpu_minutes"),
        ({"schedule": {"name": "noam"}, "optim": {"lr": 0.1}}, "optim.lr", "noam"),
        ({"schedule": {"warmup": 10}, "limits": {"steps": 10}}, "schedule.warmup", "limits.steps 10"),
        ({"schedule": {"warmup": 9, "steps": 9}}, "schedule.cosine.warmup", "schedule.steps 9"),
        ({"evaluate": {"every": None, "patience": 2}}, "evaluate.patience", "evaluate.every"),
        ({"save": {"average_last": 5}}, "save.average_last", "save.keep_last"),
        ({"devices": 2, "strategy": "none"}, "strategy", "ddp"),
        ({"data": {"tokenizer": "byte", "vocab": 500}}, "data.vocab", "bpe"),
    ],
)
def test_settings_that_contradict_one_another(settings: Any, path: str, word: str) -> None:
    actual = complaints(**settings)
    assert list(actual) == [path]
    assert word in actual[path]


def test_every_setting_is_documented() -> None:
    from manyformer.config.setting_names import SECTIONS, section_members

    for model in (RunConfig, *(member for name in SECTIONS for member in section_members(name))):
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name} has no docstring"
