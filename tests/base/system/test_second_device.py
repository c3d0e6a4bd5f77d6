"""Every recipe on a second device: the numbers of the CPU, no tensor left behind, and the waits that are stated."""

from typing import Any

import pytest
import torch

import manyformer as mf
from pretended_device import stated_reads
from pretended_device.recipe_jobs import JobResult, run_on_cpu, run_pretended

RECIPES = sorted(mf.recipes())
STATED = stated_reads.read()

pytestmark = [
    pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN"),
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step"),
]

FLEX_ROUNDING = 1e-3
"""Relative to the largest number of a tensor: gradients of paths that only CUDA takes, in float32."""


def compare(recipe: str, job: str, tolerance: float = FLEX_ROUNDING) -> JobResult | str:
    expected, actual = run_on_cpu(recipe, job), run_pretended(recipe, job)
    if isinstance(expected, str) or isinstance(actual, str):
        return actual
    assert len(actual.numbers) == len(expected.numbers)
    for found, right in zip(actual.numbers, expected.numbers, strict=True):
        assert found.shape == right.shape
        scale = float(right.double().abs().max()) if right.numel() else 1.0
        torch.testing.assert_close(found.double(), right.double(), rtol=0.0, atol=tolerance * max(scale, 1e-6))
    return actual


def check_waits(recipe: str, job: str, result: JobResult | str) -> None:
    waits = result.waits if isinstance(result, JobResult) else {}
    sentence = stated_reads.difference(recipe, job, waits, STATED)
    assert not sentence, sentence


@pytest.mark.thinned(3)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_training_step_learns_what_it_learns_on_a_cpu_and_waits_as_often_as_stated(recipe: str) -> None:
    result = compare(recipe, "training")
    assert isinstance(result, JobResult), result
    check_waits(recipe, "training", result)


@pytest.mark.thinned(6)
@pytest.mark.parametrize("recipe", RECIPES)
def test_decoding_chooses_the_tokens_of_a_cpu_and_waits_as_often_as_stated(recipe: str) -> None:
    check_waits(recipe, "decoding", compare(recipe, "decoding"))


@pytest.mark.thinned(10)
@pytest.mark.parametrize("recipe", RECIPES)
def test_static_steps_choose_the_tokens_of_a_cpu_and_wait_as_often_as_stated(recipe: str) -> None:
    check_waits(recipe, "static steps", compare(recipe, "static steps"))


@pytest.mark.thinned(14)
@pytest.mark.parametrize("recipe", RECIPES)
def test_beams_choose_the_tokens_of_a_cpu(recipe: str) -> None:
    compare(recipe, "beams")


@pytest.mark.thinned(6)
@pytest.mark.parametrize("recipe", RECIPES)
def test_packed_rows_have_the_gradients_of_a_cpu_and_wait_as_often_as_stated(recipe: str) -> None:
    check_waits(recipe, "packed rows", compare(recipe, "packed rows"))


@pytest.mark.thinned(6)
@pytest.mark.parametrize("recipe", RECIPES)
def test_padding_on_the_left_has_the_gradients_of_a_cpu(recipe: str) -> None:
    compare(recipe, "left padding")


@pytest.mark.thinned(8)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_training_step_in_bfloat16_has_nearly_the_loss_of_float32(recipe: str) -> None:
    result, exact = run_pretended(recipe, "bfloat16"), run_on_cpu(recipe, "training")
    assert isinstance(exact, JobResult)
    if isinstance(result, JobResult):
        # the first loss: later ones follow weights that have moved
        assert float(result.numbers[0][0]) == pytest.approx(float(exact.numbers[0][0]), rel=0.05)


def test_waits_are_stated_for_recipes_that_exist_each_with_a_place_that_has_a_reason() -> None:
    waits = [wait for job in stated_reads.COUNTED_JOBS for counts in STATED[job].values() for wait in counts]
    assert {name for job in stated_reads.COUNTED_JOBS for name in STATED[job]} <= set(RECIPES)
    assert {wait.partition(":")[0] for wait in waits} == STATED["reasons"].keys()


def test_a_wait_more_or_less_than_stated_is_told_with_its_place() -> None:
    stated: dict[str, Any] = {"training": {"bert": {"models/encoder_model.py select_targets: index by a mask": 2}}}
    sentence = stated_reads.difference("bert", "training", {}, stated)
    assert "a training step of bert waits 0 times for the device, and docs/host_reads.json says 2" in sentence
    assert "models/encoder_model.py select_targets: index by a mask (2 -> 0)" in sentence
    assert stated_reads.COMMAND in sentence
