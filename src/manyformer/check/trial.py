"""What every contract is given: the model, the inputs to draw, and how near is near enough."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, final

import torch
from jaxtyping import Int
from torch import Tensor

from manyformer.check.subject import Inputs, Subject

Backend = Literal["aot_eager", "inductor"]


class Finding(NamedTuple):
    """What a contract found; `good` is its verdict."""

    good: bool
    sentence: str
    measured: float | None = None
    tolerance: float | None = None


def kept(sentence: str, measured: float | None = None, tolerance: float | None = None) -> Finding:
    """The finding that a promise is kept."""
    return Finding(good=True, sentence=sentence, measured=measured, tolerance=tolerance)


def broken(sentence: str, measured: float | None = None, tolerance: float | None = None) -> Finding:
    """The finding that a promise is broken."""
    return Finding(good=False, sentence=sentence, measured=measured, tolerance=tolerance)


class Untestable(Exception):
    """A contract cannot be tested on this model or machine; the message says why."""


@final
@dataclass(frozen=True)
class Trial:
    """One contract's run: `length` tokens where many steps are taken, `reach` where few calls are."""

    subject: Subject
    generator: torch.Generator
    length: int
    reach: int
    tolerance: float
    backend: Backend = "aot_eager"

    def fit(self, length: int) -> int:
        """The nearest length that the model takes: a multiple of what it asks for, at least one of them."""
        multiple = self.subject.multiple
        return max(round(length / multiple), 1) * multiple

    def number(self, below: int) -> int:
        """A random whole number from 0 on."""
        return int(torch.randint(below, (), generator=self.generator))

    def tokens(self, rows: int, length: int) -> Int[Tensor, "b l"]:
        """Random tokens."""
        ids = self.subject.ids
        return ids[torch.randint(len(ids), (rows, length), generator=self.generator).to(ids.device)]

    def others(self, tokens: Int[Tensor, "b l"]) -> Int[Tensor, "b l"]:
        """Random tokens that differ from the given ones everywhere."""
        ids = self.subject.ids
        shift = torch.randint(1, len(ids), tokens.shape, generator=self.generator).to(ids.device)
        return ids[(torch.searchsorted(ids, tokens.contiguous()) + shift) % len(ids)]

    def draw(self, rows: int, length: int, *, source: int | None = None) -> Inputs:
        """Random rows of `length` tokens; an encoder-decoder also gets sources, of about that length or of `source`."""
        if not self.subject.sourced:
            return Inputs(self.tokens(rows, length))
        return Inputs(self.tokens(rows, length), None, self.tokens(rows, source or length * 2 // 3 + 1))

    def documents(self, lengths: Sequence[int]) -> list[Inputs]:
        """One row for each length, with sources of other lengths."""
        return [
            self.draw(1, self.fit(length), source=1 + (5 * number + length) % self.length)
            for number, length in enumerate(lengths)
        ]


class Worst:
    """The largest difference of several comparisons, relative to the size of what is right, and where it was."""

    def __init__(self) -> None:
        self.measured, self.where = 0.0, ""

    def add(self, got: Tensor, want: Tensor, where: str) -> None:
        """Compare. A shape that differs is a mistake and raises ValueError."""
        if got.shape != want.shape:
            raise ValueError(f"{where}: the shape is {tuple(got.shape)}, {tuple(want.shape)} was expected")
        if not want.numel():
            return
        got, want = got.detach().double(), want.detach().double()
        measured = float((got - want).abs().max() / want.abs().max().clamp(min=1.0))
        # a NaN must win over every number, and stay
        if self.measured == self.measured and not measured <= self.measured:
            self.measured, self.where = measured, where

    def finding(self, good: str, tolerance: float) -> Finding:
        """`good` is the sentence where all agree; otherwise it names the worst place."""
        if self.measured <= tolerance:
            return kept(good, self.measured, tolerance)
        return broken(f"{self.where}: {self.measured:.1e} apart", self.measured, tolerance)
