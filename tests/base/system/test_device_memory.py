"""Models that cannot fit, and failed allocations: one sentence with what was needed and what makes it smaller."""

import multiprocessing
import resource
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.nn.runtime.devices import (
    OutOfMemory,
    check_model_fits,
    describe_request,
    device_memory,
    format_memory,
    is_out_of_memory,
    report_out_of_memory,
)
from manyformer.recipes.parts.registry import build_on_meta

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "keywords",
    [
        {"dim": 100_000_000},
        {"dim": 2**31 - 1, "vocab": 2**31 - 1, "heads": 1},
        {"vocab": 1_000_000_000},
        {"max_length": 2**31 - 1},
        {"ff_dim": 2**31 - 1},
    ],
)
def test_a_model_that_cannot_fit_is_refused_before_it_is_built(keywords: dict[str, int]) -> None:
    with pytest.raises(
        OutOfMemory, match=r"transformer-lm does not fit into the memory of this CPU, .* (or more )?are needed"
    ):
        mf.build("transformer-lm", **keywords)


def test_a_model_of_too_many_modules_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyformer.nn.runtime.devices.MAX_MODULES", 1000)
    for build in (mf.build, lambda name, **keywords: build_on_meta(name, keywords)):
        with pytest.raises(OutOfMemory, match="transformer-lm has more than 1,000 modules"):
            build("transformer-lm", depth=5000, dim=8, heads=1)


def test_a_keyword_beyond_32_bits_is_refused() -> None:
    with pytest.raises(UserError, match=r"dim: must be at most 2147483647, got 10+"):
        mf.build("transformer-lm", dim=10**30)


def test_training_needs_four_numbers_for_each_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of this model fill a megabyte and more, so that they fit alone, and not in training."""
    keywords = {"vocab": 5000, "dim": 64, "depth": 1, "heads": 2}
    size = sum(weight.nbytes for weight in mf.build("transformer-lm", **keywords).parameters())
    monkeypatch.setattr("manyformer.nn.runtime.devices.device_memory", lambda device: 2 * size)

    def check(copies: int) -> None:
        build = lambda: mf.build("transformer-lm", **keywords)  # noqa: E731
        check_model_fits(build, "transformer-lm", keywords, copies=copies, device=CPU)

    check(copies=1)
    with pytest.raises(OutOfMemory, match="to train it, 4 numbers for each weight; make dim"):
        check(copies=4)


def test_counting_a_model_draws_no_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    keywords = {"vocab": 5000, "dim": 16, "depth": 1, "heads": 2}
    torch.manual_seed(3)
    mf.build("transformer-lm", **keywords)
    counted = torch.rand(3)
    monkeypatch.setattr(
        sys.modules["manyformer.recipes.parts.registry"], "check_model_fits", lambda *args, **options: None
    )
    torch.manual_seed(3)
    mf.build("transformer-lm", **keywords)
    assert torch.equal(counted, torch.rand(3))


def _in_child(work: Callable[[], object], memory: int) -> str:
    """The sentence of the error that `work` raises in a process of limited memory."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe()

    def child() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        try:
            work()
        except UserError as error:
            sender.send(str(error))
        except BaseException as error:
            sender.send(f"{type(error).__name__}: {error}")

    process = context.Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0
    return str(receiver.recv())


def _used_memory() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: torch.empty(1 << 40),
        lambda: np.zeros(1 << 40),
        lambda: bytearray(1 << 42),
        lambda: torch.empty(1 << 62, 1 << 62),
    ],
)
def test_failed_allocations_of_every_library_are_one_sentence(allocate: Callable[[], Any]) -> None:
    def work() -> None:
        with report_out_of_memory("in a test", "make it smaller"):
            allocate()

    assert _in_child(work, _used_memory() + (1 << 28)).startswith("out of memory in a test")


def test_other_errors_stay_as_they_are() -> None:
    for error in (RuntimeError("sizes do not match"), ValueError("no"), KeyError("memory")):
        assert not is_out_of_memory(error)
        with pytest.raises(type(error)), report_out_of_memory("in a test", "none"):
            raise error


def test_the_size_of_a_request_is_read_from_the_message() -> None:
    assert describe_request(
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.")
    )
    assert (
        describe_request(RuntimeError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0")) == " (2.50 GiB at once)"
    )
    assert describe_request(MemoryError()) == ""
    assert [format_memory(size) for size in (0, 1023, 2048, 5 << 40)] == ["0 B", "1,023 B", "2 KiB", "5 TiB"]


def test_the_memory_of_a_process_is_what_its_limit_allows() -> None:
    limit = _used_memory() + (1 << 30)
    assert device_memory(CPU) > 1 << 28

    def work() -> None:
        raise UserError(str(device_memory(CPU)))

    assert int(_in_child(work, limit)) <= limit
