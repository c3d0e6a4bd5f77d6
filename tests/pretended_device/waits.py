"""The moments at which Python waits for the pretended device, counted by kind and by place in the package."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

PACKAGE = "/manyformer/"
"""What the paths of the package's files have in common."""


class Wait(NamedTuple):
    """One kind of wait, such as "item" or "copy to the device", and the function of the package that asked for it."""

    kind: str
    place: str

    def __str__(self) -> str:
        return f"{self.place}: {self.kind}"


class Waits:
    """Counts waits; places are functions, not lines, so that they stay where they are when a file is edited."""

    def __init__(self) -> None:
        self.counts: Counter[Wait] = Counter()
        self._is_counting = True

    def add(self, kind: str) -> None:
        """Count a wait of this kind, asked for by what calls us."""
        if self._is_counting:
            self.counts[Wait(kind, place_of(sys._getframe(1)))] += 1

    def total(self) -> int:
        """The number of all waits."""
        return sum(self.counts.values())

    def clear(self) -> None:
        """Forget all waits so far."""
        self.counts.clear()

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Within it nothing is counted: for what a test itself reads."""
        before, self._is_counting = self._is_counting, False
        try:
            yield
        finally:
            self._is_counting = before

    def __str__(self) -> str:
        return "\n".join(f"{count} x {wait}" for wait, count in self.counts.most_common())


def place_of(frame: FrameType | None) -> str:
    """The innermost function of the package on the stack, as "nn/clustered/lsh_kernel.py LSHKernel.forward"."""
    while frame is not None:
        path = frame.f_code.co_filename
        # a decorator's own frame is no place
        if PACKAGE in path and frame.f_code.co_name != "call_uncompiled":
            name = frame.f_code.co_qualname.replace(".<locals>", "").replace("<lambda>", "lambda")
            return f"{path.rpartition(PACKAGE)[2]} {name}"
        frame = frame.f_back
    return "outside the package"
