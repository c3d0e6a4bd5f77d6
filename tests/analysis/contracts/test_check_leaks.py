"""`check` finds every leak within its length, however small, in evaluation and in training mode."""

from dataclasses import dataclass
from typing import Any, final

import mutants
import pytest
import torch
import training_mutants
from mutants import language_model, with_mistake
from torch import Tensor, nn

import manyformer as mf
from manyformer.analysis.contracts import Adapter
from manyformer.analysis.contracts.leak_search import PlaceFinder
from manyformer.analysis.own_models import build_tiny
from manyformer.nn import SoftmaxKernel
from manyformer.nn.core import TokenPositions
from manyformer.nn.masks import Causal, Mask


@final
@dataclass(frozen=True)
class LeakingPair(Mask):
    """Each query at a multiple of `period`, plus `offset`, sees the key `distance` after it; 0: only one query does."""

    offset: int
    distance: int
    period: int

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Tensor:
        queries = q.position_ids - self.offset
        leaking = queries == 0 if self.period == 0 else queries % self.period == 0
        return leaking & (k.position_ids == q.position_ids + self.distance)


def leaking_model(leak: LeakingPair, *, training_only: bool) -> Any:
    """A language model of one layer with causal attention and one more visible pair, or one a period."""
    model = build_tiny("compose", {"depth": 1, "dim": 8, "heads": 1}, seed=0)
    (attention,) = (module for module in model.modules() if isinstance(getattr(module, "kernel", None), SoftmaxKernel))
    causal, leaking = (SoftmaxKernel(mask, path="sdpa") for mask in (Causal(), Causal() | leak))
    attention.kernel = leaking

    def choose_kernel(module: nn.Module, arguments: Any) -> None:
        attention.kernel = leaking if attention.training else causal

    if training_only:
        model.register_forward_pre_hook(choose_kernel)
    return model


def random_leak(generator: torch.Generator, length: int, *, periodic: bool) -> LeakingPair:
    """A leak at a random position, or at a random period, of a random distance, most of them the smallest."""

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    distance = 1 if draw(0, 3) else draw(1, length // 2)
    offset = draw(0, length - distance)
    return LeakingPair(offset, distance, draw(3, length // 2) if periodic else 0)


@pytest.fixture
def without_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaks are found and their places are not looked for, which takes most of the time of a check that fails."""
    monkeypatch.setattr(PlaceFinder, "find", lambda *arguments: None)


def assert_found(seed: int, count: int, length: int) -> None:
    """Check models with `count` random leaks, half of them periodic and half of them in training mode alone."""
    generator = torch.Generator().manual_seed(seed)
    for index in range(count):
        leak, training_only = random_leak(generator, length, periodic=index % 2 == 1), index % 4 >= 2
        model = leaking_model(leak, training_only=training_only)
        evaluation, training = mf.check(model, only=["causal", "causal-training"], length=length, seed=index).rows
        assert training.verdict == "failed", f"{leak}: {training.sentence}"
        assert evaluation.verdict == ("passed" if training_only else "failed"), f"{leak}: {evaluation.sentence}"


def test_a_single_visible_later_token_is_found_wherever_it_is(without_places: None) -> None:
    assert_found(seed=0, count=24, length=48)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 26))
def test_a_single_visible_later_token_is_found_among_512(seed: int, without_places: None) -> None:
    assert_found(seed, count=8, length=512)


def test_the_same_model_without_a_leak_is_sound_in_both_modes() -> None:
    for training_only in (False, True):
        model = leaking_model(LeakingPair(10**6, 1, 0), training_only=training_only)
        assert mf.check(model, only=["causal", "causal-training"], length=48).ok


@pytest.mark.parametrize("mistake", [training_mutants.MixedInTraining, training_mutants.NormalizedByBatch])
def test_a_mean_over_tokens_in_training_alone_is_a_leak(mistake: type[mutants.Simple]) -> None:
    report = mf.check(language_model(mistake()), only=["causal", "causal-gradient", "causal-training", "batch"])
    assert [row.contract for row in report.failed] == ["causal-training"]
    assert "the future leaks: token" in report["causal-training"].sentence


def test_rows_that_know_of_each_other_in_training_alone_are_found() -> None:
    only = ["causal", "causal-training", "batch", "batch-training"]
    report = mf.check(language_model(training_mutants.WhitenedInTraining()), only=only)
    assert [row.contract for row in report.failed] == ["batch-training"]
    assert "the others exchanged" in report["batch-training"].sentence


def test_dropout_is_no_leak() -> None:
    torch.manual_seed(3)
    model = mf.build("transformer-lm", **mutants.SMALL, dropout=0.3)
    only = ["causal-training", "batch-training"]
    assert [row.verdict for row in mf.check(model, only=only).rows] == ["passed", "passed"]
    model = with_mistake(model, training_mutants.MixedInTraining())
    assert mf.check(model, only=only)["causal-training"].verdict == "failed"


def test_dropout_whose_numbers_follow_from_other_tokens_is_not_compared() -> None:
    torch.manual_seed(3)
    model = mf.build("universal-transformer-lm", vocab=23, dim=16, heads=2, ff_dim=24, dropout=0.3)
    for row in mf.check(model, only=["causal-training", "batch-training"], length=24).rows:
        assert row.verdict == "not run"
        assert "random numbers" in row.sentence


def test_noise_that_cannot_be_seeded_is_not_compared() -> None:
    row = mf.check(language_model(training_mutants.RandomInTraining()), only=["causal-training"])["causal-training"]
    assert row.verdict == "not run"
    assert "two equal calls in training mode differ" in row.sentence


def test_buffers_of_training_are_the_same_in_every_call_and_put_back() -> None:
    mistake = training_mutants.Counting()
    report = mf.check(language_model(mistake), only=["causal-training", "batch-training"])
    assert report.ok, report.table()
    assert int(mistake.calls) == 0


def test_rows_that_know_of_each_other_are_no_leak_of_the_future() -> None:
    assert mf.check(language_model(mutants.Whitened()), only=["causal", "causal-training"]).ok


def test_a_leak_beyond_512_tokens_is_found_by_the_probe(without_places: None) -> None:
    torch.manual_seed(3)
    model = with_mistake(mf.build("compose", vocab=23, dim=16, depth=1, heads=2), mutants.VeryLateLeak())
    report = mf.check(model, only=["causal", "causal-training"])
    assert len(report.failed) == 2
    assert "causality at 512 and a few of 2048" in report.heading
    assert mf.check(model, only=["causal"], length=64).ok


def test_the_probe_stops_at_the_longest_sequence_of_a_model() -> None:
    embed = nn.Embedding(700, 5)

    def logits(tokens: Tensor) -> Tensor:
        return embed(tokens.clamp(max=4)) + embed(torch.arange(tokens.shape[1]))

    report = mf.check(Adapter(logits=logits, vocab=5, max_length=700, length_multiple=3), only=["causal"])
    assert report.ok, report.table()
    assert report.lengths == (48, 513, 699)
