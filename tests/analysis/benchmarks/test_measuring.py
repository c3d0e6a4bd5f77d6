"""Clocks, memory and operation counts, against what is known beforehand."""

import time
from typing import Any

import pytest
import torch

import manyformer as mf
from manyformer.analysis.benchmarks import (
    extra_memory,
    load_warning,
    median_with_quartiles,
    paired_ratio,
    take_turns,
    time_job,
)
from manyformer.analysis.benchmarks import measuring as clock
from manyformer.analysis.benchmarks.measuring import PROCESS, is_noisy
from manyformer.nn.batches import CausalLMBatch
from manyformer.nn.runtime.costs import count_flops

CPU = torch.device("cpu")
MEGABYTE = 1_000_000


def test_jobs_take_turns_and_none_is_always_first() -> None:
    order: list[str] = []
    jobs = {name: (lambda name=name: order.append(name)) for name in "abc"}
    times = take_turns(jobs, 4, CPU, expected_seconds=dict.fromkeys("abc", 1.0))
    assert "".join(order) == "abc" + "bca" + "cab" + "abc"
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 4, "b": 4, "c": 4}


def test_short_jobs_are_repeated_and_the_time_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[float] = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: sum(begun))
    (seconds,) = take_turns({"nap": lambda: begun.append(0.002)}, 1, CPU)["nap"]
    # once to find out how long it takes, then until it lasts long enough to be timed
    assert len(begun) - 1 == 1 + clock.MIN_SECONDS / 0.002
    assert seconds == pytest.approx(0.002)


def test_times_are_those_of_the_wall() -> None:
    assert time_job(lambda: time.sleep(0.03), CPU) >= 0.03, "a process that sleeps uses no time of the processor"


def test_a_disturbed_round_does_not_move_a_paired_ratio() -> None:
    reference = [1.0, 1.1, 0.9, 10.0, 1.0]
    assert paired_ratio([2 * seconds for seconds in reference], reference) == (2.0, 2.0, 2.0)
    assert paired_ratio([2.0, 2.2, 1.8, 2.0, 2.0], reference).median == 2.0


def test_median_and_quartiles_of_numbers() -> None:
    assert median_with_quartiles([3.0]) == (3.0, 3.0, 3.0)
    assert median_with_quartiles([4.0, 1.0, 3.0, 2.0, 5.0]) == (3.0, 2.0, 4.0)


@pytest.mark.parametrize(("times", "verdict"), [([1.0, 1.01, 0.99, 1.02, 5.0], False), ([1.0, 1.5, 0.7, 2.0], True)])
def test_one_disturbed_round_does_not_make_times_noisy(times: list[float], verdict: bool) -> None:
    assert is_noisy(times) is verdict


@pytest.mark.parametrize(("load", "warned"), [(0.1, False), (1.7, True)])
def test_a_busy_machine_gets_a_warning(load: float, warned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, 9.0, 9.0))
    warning = load_warning()
    assert (warning is not None) is warned
    assert warning is None or "busy before the measurement (load 1.7" in warning


@pytest.mark.skipif(not (PROCESS / "clear_refs").exists(), reason="the peak of memory is kept by Linux only")
@pytest.mark.parametrize("size", [10, 60])
def test_extra_memory_is_the_peak_beyond_what_was_there(size: int) -> None:
    kept = torch.ones(40 * MEGABYTE // 4)

    def job() -> None:
        first = torch.ones(size * MEGABYTE // 8)
        assert (first + kept[0]).numel() == first.numel()

    job()
    for _ in range(2):
        actual = extra_memory(job, CPU)
        assert actual is not None
        assert abs(actual - size * MEGABYTE) < 2 * MEGABYTE


def test_extra_memory_is_unknown_where_the_system_keeps_no_peak(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyformer.analysis.benchmarks.measuring.PROCESS", tmp_path / "nothing")
    assert extra_memory(lambda: pytest.fail("it must not run in vain"), CPU) is None
    assert extra_memory(lambda: None, torch.device("meta")) is None


@pytest.mark.parametrize("vocab", [256, 8192])
def test_operations_are_counted_as_by_hand(vocab: int) -> None:
    """Attention on a CPU, which torch's own counter passes over, is in it, and the loss in chunks of tokens."""
    dim, depth, heads, length, batch = 64, 2, 4, 128, 5
    model = mf.build("transformer-lm", vocab=vocab, dim=dim, depth=depth, heads=heads, max_length=length)
    tokens = torch.randint(0, vocab, (batch, length))
    products = 2 * batch * length * (depth * (4 * dim * dim + 2 * 4 * dim * dim) + dim * vocab)
    pairs = 2 * depth * batch * length * length * dim
    assert count_flops(lambda: model(tokens)) == products + 2 * pairs
    # each product costs twice itself on the way back; attention forms its scores once more
    expected = 3 * products + 7 * pairs
    assert count_flops(lambda: model.loss(CausalLMBatch(tokens, tokens)).total.backward()) == expected


def test_layers_that_are_recomputed_are_counted_again() -> None:
    tokens = torch.randint(0, 50, (1, 64))
    counts = {}
    for residual in ("plain", "reversible"):
        model = mf.build("reformer", vocab=50, dim=32, depth=2, heads=2, residual_streams=residual)
        counts[residual] = count_flops(lambda model=model: model.loss(CausalLMBatch(tokens, tokens)).total.backward())
    forward = count_flops(lambda: model(tokens))
    # all but the head and the hashes, which are remembered
    assert 0.85 * forward < counts["reversible"] - counts["plain"] < forward
