"""Results that a thread computes ahead: in order, bounded, errors in their place, and no thread left over."""

import _thread
import itertools
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from manyformer.base.errors import UserError
from manyformer.training.ahead_feed import BackgroundReader

NAME = "read by a test"


def is_running() -> bool:
    return any(thread.name == NAME for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert not is_running()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_results_come_in_the_order_of_the_calls() -> None:
    reader = BackgroundReader(itertools.count().__next__, 3, name=NAME)
    assert [reader.take() for _ in range(50)] == list(range(50))
    assert is_running()
    reader.close()


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_no_more_results_exist_than_were_asked_for(ahead: int) -> None:
    numbers = itertools.count()
    begun: list[int] = []

    def read() -> int:
        begun.append(next(numbers))
        return begun[-1]

    reader = BackgroundReader(read, ahead, name=NAME)
    assert begun == []
    for taken in range(1, 6):
        assert reader.take() == taken - 1
        wait_until(lambda taken=taken: len(begun) == taken + ahead)  # type: ignore[misc]
        time.sleep(0.01)
        assert len(begun) == taken + ahead
    reader.close()


def test_an_error_comes_in_the_place_of_its_result_and_again() -> None:
    results = iter([1, 2])
    error = UserError("line 3 of a.txt is no text")

    def read() -> int:
        for result in results:
            return result
        raise error

    reader = BackgroundReader(read, 5, name=NAME)
    assert reader.take() == 1
    wait_until(lambda: not is_running())
    assert reader.take() == 2
    for _ in range(2):
        with pytest.raises(UserError, match=r"line 3 of a\.txt is no text") as caught:
            reader.take()
        assert caught.value is error
    reader.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError, StopIteration])
def test_no_kind_of_error_leaves_the_taker_waiting(error: type[BaseException]) -> None:
    def read() -> int:
        raise error

    reader = BackgroundReader(read, 2, name=NAME)
    with pytest.raises(error):
        reader.take()
    reader.close()


def test_closing_ends_a_thread_that_waits_for_a_place_and_one_that_reads() -> None:
    full = BackgroundReader(itertools.count().__next__, 1, name=NAME)
    full.take()
    full.close()
    assert not is_running()
    goes_on, is_reading = threading.Event(), threading.Event()

    def read() -> int:
        is_reading.set()
        goes_on.wait(10)
        return 0

    slow = BackgroundReader(read, 1, name=NAME)
    taker = threading.Thread(target=slow.take)
    taker.start()
    assert is_reading.wait(10)
    goes_on.set()
    taker.join()
    slow.close()
    assert not is_running()


def test_one_that_was_never_used_has_no_thread() -> None:
    reader = BackgroundReader(itertools.count().__next__, 1, name=NAME)
    assert not is_running()
    reader.close()


def test_an_interruption_reaches_the_taker_while_it_waits() -> None:
    is_reading, goes_on = threading.Event(), threading.Event()

    def read() -> int:
        is_reading.set()
        goes_on.wait(10)
        return 0

    def interrupt() -> None:
        is_reading.wait(10)
        _thread.interrupt_main()

    reader = BackgroundReader(read, 1, name=NAME)
    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        reader.take()
    interrupter.join()
    goes_on.set()
    reader.close()


def test_a_system_without_threads_to_spare_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    reader = BackgroundReader(itertools.count().__next__, 1, name=NAME)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(UserError, match=r"no thread could be started to read ahead .*; set batch.ahead=0"):
        reader.take()
    reader.close()
