"""Results that a thread computes before they are needed, a bounded number of them, taken in order."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar, final

from manyformer.errors import UserError

T = TypeVar("T")


class _Failure:
    """What a call raised, in the place of its result."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


@final
class BackgroundReader(Generic[T]):
    """Calls `read` again and again in a thread of its own, and holds the results until they are taken, in their order.

    At most `ahead` results are held, the one that is being read included, so that memory is bounded. What `read` raises
    ends the thread, and is raised by the `take` that would have had the result. The thread starts with the first
    `take`, and ends at `close`; it is a daemon, so that a process never waits for one that was not closed.
    """

    def __init__(self, read: Callable[[], T], ahead: int, *, name: str) -> None:
        assert ahead >= 1
        self._read = read
        self._ahead = ahead
        self._results: deque[T | _Failure] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def take(self) -> T:
        """The next result, for which this waits. Raises what `read` raised in its place, again at every later call."""
        if self._thread.ident is None:
            self._start()
        with self._changed:
            # without a timeout: the thread leaves a result or an error, whatever happens to it
            self._changed.wait_for(lambda: self._results)
            result = self._results[0]
            if isinstance(result, _Failure):
                raise result.error
            self._results.popleft()
            self._changed.notify_all()
        return result

    def close(self) -> None:
        """End the thread, after the call of `read` that it is in, and drop the results that were not taken."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()
        self._results.clear()

    def _start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as error:
            # the limit of processes that the system sets, of which threads are a part
            raise UserError(f"no thread could be started to read ahead ({error}); set batch.ahead=0") from error

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or len(self._results) < self._ahead)
                if self._is_closed:
                    return
            result: T | _Failure
            try:
                result = self._read()
            except BaseException as error:
                result = _Failure(error)
            with self._changed:
                self._results.append(result)
                self._changed.notify_all()
            if isinstance(result, _Failure):
                return
            # the caller alone holds the result from now on
            del result
