"""Every contract can fail: each mistake is found by the contracts that are for it, and by no others."""

from collections.abc import Callable, Iterator
from typing import Any

import mutants
import pytest
import torch
from mutants import language_model, named, with_mistake

import manyformer as mf
from manyformer.analysis.contracts import CONTRACTS, Adapter, CheckReport, ContractRow
from manyformer.models import LanguageModel, Model
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.core import Layer
from manyformer.recipes import RECIPES, recipe

STREAMING = ["causal", "cached", "prefill", "preallocated", "rewind", "beams"]


def red(report: CheckReport) -> set[str]:
    return {row.contract for row in report.failed}


def check_one(model: Any, contract: str) -> ContractRow:
    return mf.check(model, only=[contract])[contract]


def test_the_sound_model_keeps_every_promise() -> None:
    report = mf.check(language_model(), skip=["compile"])
    assert report.ok, report.table()
    assert {row.contract for row in report.rows if row.verdict == "passed"} == {
        name for name, contract in CONTRACTS.items() if contract.runs_by_default
    } - {"compile", "source-padding", "targets", "float16"}


def test_a_leak_is_found_by_both_ways_and_measured() -> None:
    report = mf.check(language_model(mutants.Leak()), only=["causal", "causal-gradient"])
    assert red(report) == {"causal", "causal-gradient"}
    measured = report["causal"].measured
    assert measured is not None
    assert 0 < measured < 1e-3
    assert "change outputs from 0 on" in report["causal"].sentence


def test_a_leak_without_gradient_is_found_by_changing_tokens_alone() -> None:
    report = mf.check(language_model(mutants.HiddenLeak()), only=["causal", "causal-gradient"])
    assert red(report) == {"causal"}


def test_a_leak_of_long_rows_alone_is_found_unless_shorter_ones_are_asked_for() -> None:
    torch.manual_seed(3)
    model = with_mistake(mf.build("compose", vocab=23, dim=16, depth=1, heads=2), mutants.LateLeak())
    assert red(mf.check(model, only=["causal"])) == {"causal"}
    assert mf.check(model, only=["causal"], length=64).ok


def test_rounding_that_follows_from_later_tokens_is_a_leak_where_shapes_are_fixed_alone() -> None:
    row = check_one(language_model(mutants.Rescaled()), "causal")
    assert (row.verdict, row.tolerance) == ("failed", 0.0)
    for sound in (mutants.RescaledByWidth, mutants.RescaledByContent):
        row = check_one(language_model(sound()), "causal")
        assert row.verdict == "passed", row.sentence
        assert "but for rounding" in row.sentence
        assert row.measured is not None
        assert row.tolerance is not None
        assert 0 < row.measured < 1e-12 < row.tolerance < 1e-7


def test_rounding_of_a_third_party_module_is_no_leak_where_float64_says_so() -> None:
    model = language_model(mutants.Rescaled())
    for module, verdict in ((model, "passed"), (None, "failed")):
        adapter = Adapter(logits=lambda tokens: model(tokens).logits, vocab=23, max_length=64, module=module)
        assert check_one(adapter, "causal").verdict == verdict


@pytest.mark.parametrize("mistake", [mutants.Leak, mutants.HiddenLeak, mutants.GatheredLeak])
def test_a_leak_of_a_third_party_module_is_found(mistake: Callable[[], Layer]) -> None:
    model = language_model(mistake())
    adapter = Adapter(logits=lambda tokens: model(tokens).logits, vocab=23, max_length=64, module=model)
    assert check_one(adapter, "causal").verdict == "failed"


@pytest.mark.thinned(2)
@pytest.mark.parametrize("mistake", [mutants.Leak, mutants.HiddenLeak])
@pytest.mark.parametrize("name", ["universal-transformer-lm", "routing-transformer-strict"])
def test_a_leak_is_found_among_layers_that_compute_by_content(name: str, mistake: Callable[[], Layer]) -> None:
    torch.manual_seed(3)
    model = with_mistake(mf.build(name, vocab=23, dim=16, depth=1, heads=2), mistake())
    row = mf.check(model, only=["causal"], length=48)["causal"]
    assert row.verdict == "failed"
    assert "the future leaks" in row.sentence


def test_a_leak_is_found_whose_size_follows_from_content() -> None:
    row = check_one(language_model(mutants.GatheredLeak()), "causal")
    assert row.verdict == "failed"
    assert "the future leaks" in row.sentence


def test_a_model_that_ignores_its_inputs_does_not_pass_as_causal() -> None:
    report = mf.check(language_model(mutants.Constant()), only=["causal", "causal-gradient"])
    assert red(report) == {"causal", "causal-gradient"}
    assert "causality cannot be shown" in report["causal"].sentence


def test_a_sound_token_shift_streams() -> None:
    report = mf.check(language_model(mutants.Shift()), only=STREAMING)
    assert report.ok, report.table()


@pytest.mark.parametrize(
    ("mistake", "found"),
    [
        (mutants.ForgetfulShift, {"cached", "prefill", "preallocated", "rewind", "beams"}),
        (mutants.StepwiseShift, {"prefill", "preallocated", "rewind", "beams"}),
        (mutants.InPlaceShift, {"rewind"}),
        (mutants.RoomyShift, {"preallocated"}),
        (mutants.StuckShift, {"beams"}),
    ],
)
def test_broken_states_are_found(mistake: Callable[[], Layer], found: set[str]) -> None:
    assert red(mf.check(language_model(mistake()), only=STREAMING)) == found


def test_a_mean_over_padding_and_neighbours_is_found() -> None:
    kinds = ["causal", "padding-right", "padding-left", "padding-ragged", "packing", "packing-state", "batch"]
    report = mf.check(language_model(mutants.Average()), only=kinds)
    assert red(report) == {"padding-left", "padding-ragged", "packing", "packing-state"}


@pytest.mark.parametrize("name", ["bert", "transformer-classifier"])
def test_an_encoder_that_pools_padding_is_found(name: str) -> None:
    torch.manual_seed(3)
    model = with_mistake(mf.build(name, vocab=23, dim=16, depth=1, heads=2), mutants.Pool())
    report = mf.check(model, only=["padding-right", "padding-left", "packing", "batch"])
    assert red(report) == {"padding-right", "padding-left"} | ({"packing"} if name == "bert" else set())


def test_counting_columns_instead_of_positions_is_found() -> None:
    kinds = ["padding-right", "padding-left", "padding-state", "cached"]
    assert red(mf.check(language_model(mutants.Columns()), only=kinds)) == set(kinds) - {"padding-right"}
    assert mf.check(language_model(mutants.Positions()), only=kinds).ok


def test_a_source_whose_padding_is_seen_is_found() -> None:
    torch.manual_seed(3)
    model = mf.build("transformer", vocab=23, dim=16, depth=1, heads=2)
    kinds = ["source-padding", "padding-right", "padding-left", "batch"]
    assert mf.check(with_mistake(model, None), only=kinds).ok
    assert "source-padding" in red(mf.check(with_mistake(model, mutants.Pool(), where="encoder"), only=kinds))


def test_rows_that_know_of_each_other_are_found() -> None:
    row = check_one(language_model(mutants.Whitened()), "batch")
    assert row.verdict == "failed"
    assert "row 0" in row.sentence


def test_parameters_without_a_gradient_are_named() -> None:
    row = check_one(language_model(mutants.Unused()), "gradients")
    assert (row.verdict, row.measured) == ("failed", 3)
    for name in ("idle.weight", "idle.bias", "silenced.weight"):
        assert f"body.mistake.{name}" in row.sentence


def test_a_nan_in_an_empty_row_is_found_forward_and_backward() -> None:
    forward = check_one(language_model(mutants.EmptyNaN()), "empty-rows")
    assert forward.verdict == "failed"
    assert "rows [0]" in forward.sentence
    backward = check_one(language_model(mutants.EmptyNaNGradient()), "empty-rows")
    assert backward.verdict == "failed"
    assert "gradient" in backward.sentence


def test_lost_precision_is_found() -> None:
    kinds = ["float64", "bfloat16"]
    assert red(mf.check(language_model(mutants.Cancelling()), only=kinds)) == {"float64"}
    report = mf.check(language_model(mutants.Overflowing()), only=kinds)
    assert red(report) == {"bfloat16"}
    assert "not finite" in report["bfloat16"].sentence


def test_noise_is_found_and_everything_else_left_alone() -> None:
    report = mf.check(language_model(mutants.Random()), only=["repeatable", "causal", "batch"])
    assert [row.verdict for row in report.rows] == ["failed", "not run", "not run"]
    assert not report.ok


def test_logits_that_are_not_finite_are_found() -> None:
    model = language_model()
    with torch.no_grad():
        model.embed.token.weight[5] = float("nan")
    row = check_one(model, "repeatable")
    assert row.verdict == "failed"
    assert "not finite" in row.sentence


def test_a_model_that_remembers_calls_is_found_and_put_back() -> None:
    mistake = mutants.Remembering()
    report = mf.check(language_model(mistake), only=["repeatable", "traceless"])
    assert red(report) == {"traceless"}
    assert mistake.shortest == 10**6


def test_a_loss_that_counts_padding_is_found() -> None:
    model: Any = language_model()
    assert check_one(model, "loss").verdict == "passed"
    model.head = mutants.WrongLoss(model.head)
    assert check_one(model, "loss").verdict == "failed"


@pytest.fixture
def mutant_recipe() -> Iterator[None]:
    facts: dict[str, Any] = {"paper": "none", "summary": "a mistake", "task": LANGUAGE_MODELLING, "cost": "O(1)"}

    @recipe("Mutant", reasons={"cross_attention": "one sequence"}, **facts)
    def mutant(vocab: int = 13, blind: int | None = None) -> LanguageModel:
        if blind is None:
            return language_model(mutants.Unsaved())
        model = language_model()
        model.body = mutants.Blind()
        return model

    yield
    del RECIPES["mutant"]


@pytest.mark.usefixtures("mutant_recipe")
def test_a_table_that_is_not_saved_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mf.build("mutant")
    monkeypatch.setattr(mutants.torch, "randn", lambda *shape: torch.ones(shape))
    row = check_one(model, "saving")
    assert row.verdict == "failed"
    assert row.measured


@pytest.mark.usefixtures("mutant_recipe")
def test_what_looks_at_no_other_token_does_not_learn() -> None:
    row = check_one(mf.build("mutant", blind=1), "learns")
    assert row.verdict == "failed"
    assert row.measured is not None
    assert row.measured > 0.95


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        (mutants.SMALL | {"depth": 2}, "in the rebuilt one"),
        (mutants.SMALL | {"ff_dim": torch.float32}, "not JSON"),
        (mutants.SMALL | {"ff_dim": (1, 2)}, "does not survive JSON"),
    ],
)
def test_a_spec_that_does_not_make_the_model_again_is_found(keywords: dict[str, Any], message: str) -> None:
    parameters = mf.recipes()["transformer-lm"].signature.parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    sound: Model = language_model()
    assert check_one(sound, "spec").verdict == "passed"
    row = check_one(named(sound, "transformer-lm", **(defaults | keywords)), "spec")
    assert row.verdict == "failed"
    assert message in row.sentence
