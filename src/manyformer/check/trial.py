"""What every contract is given: the model, the inputs to draw, and how near is near enough."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar, final

import torch
from jaxtyping import Int
from torch import Tensor

from manyformer.check.isolation import training
from manyformer.check.subject import Inputs, Subject

Backend = Literal["aot_eager", "inductor"]

T = TypeVar("T")

EXACT, SINGLE = 1e-9, 2e-5
"""How far apart equal results may be, relative to the logits, in float64 and in float32."""


class ContractFinding(NamedTuple):
    """What a contract found; `passed` is its verdict."""

    passed: bool
    sentence: str
    measured: float | None = None
    tolerance: float | None = None


def passed(sentence: str, measured: float | None = None, tolerance: float | None = None) -> ContractFinding:
    """The finding that a promise is kept."""
    return ContractFinding(passed=True, sentence=sentence, measured=measured, tolerance=tolerance)


def failed(sentence: str, measured: float | None = None, tolerance: float | None = None) -> ContractFinding:
    """The finding that a promise is broken."""
    return ContractFinding(passed=False, sentence=sentence, measured=measured, tolerance=tolerance)


class Untestable(Exception):
    """A contract cannot be tested on this model or machine; the message says why."""


@final
@dataclass(frozen=True)
class ContractTrial:
    """One contract's run: `length` tokens where many steps are taken, `long_length` where few calls are."""

    subject: Subject
    generator: torch.Generator
    length: int
    long_length: int
    tolerance: float
    backend: Backend = "aot_eager"

    def round_length(self, length: int) -> int:
        """The nearest length that the model takes: a multiple of what it asks for, at least one of them."""
        multiple = self.subject.length_multiple
        return max(round(length / multiple), 1) * multiple

    def number(self, below: int) -> int:
        """A random whole number from 0 on."""
        return int(torch.randint(below, (), generator=self.generator))

    def tokens(self, rows: int, length: int) -> Int[Tensor, "b l"]:
        """Random tokens."""
        ids = self.subject.token_ids
        return ids[torch.randint(len(ids), (rows, length), generator=self.generator).to(ids.device)]

    def different_tokens(self, tokens: Int[Tensor, "b l"]) -> Int[Tensor, "b l"]:
        """Random tokens that differ from the given ones everywhere."""
        ids = self.subject.token_ids
        shift = torch.randint(1, len(ids), tokens.shape, generator=self.generator).to(ids.device)
        return ids[(torch.searchsorted(ids, tokens.contiguous()) + shift) % len(ids)]

    def draw(self, rows: int, length: int, *, source: int | None = None) -> Inputs:
        """Random rows of `length` tokens; an encoder-decoder also gets sources, of about that length or of `source`."""
        if not self.subject.takes_source:
            return Inputs(self.tokens(rows, length))
        return Inputs(self.tokens(rows, length), None, self.tokens(rows, source or length * 2 // 3 + 1))

    def documents(self, lengths: Sequence[int]) -> list[Inputs]:
        """One row for each length, with sources of other lengths, none longer than the longest row."""
        most = max(lengths)
        return [
            self.draw(1, self.round_length(length), source=1 + (5 * number + length) % most)
            for number, length in enumerate(lengths)
        ]


def gradients_of(trial: ContractTrial, loss: Callable[[], Tensor]) -> dict[str, Tensor | None]:
    """The gradient of each parameter that asks for one, by name.

    They are accumulated, not asked for one by one: what differentiates itself, such as a reversible stack, knows no
    other way.
    """
    module = trial.subject.module
    assert module is not None
    weights = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}

    def backward() -> dict[str, Tensor | None]:
        try:
            loss().backward()  # type: ignore[no-untyped-call]
            return {name: weight.grad for name, weight in weights.items()}
        finally:
            module.zero_grad(set_to_none=True)

    return differentiate(trial, backward)


def differentiate(trial: ContractTrial, run: Callable[[], T]) -> T:
    """`run` with gradients; in training mode where evaluation mode has no backward pass, as some released models."""
    module = trial.subject.module
    with torch.enable_grad():
        try:
            return run()
        except Exception:
            if module is None:
                raise
            with training(module):
                return run()


class WorstDifference:
    """Comparisons, each relative to the size of what is right: where they first fail, and how far apart they get."""

    def __init__(self) -> None:
        self.found: list[tuple[float, str]] = []

    def add(self, got: Tensor, want: Tensor, where: str) -> None:
        """Compare. A shape that differs is a mistake and raises ValueError."""
        if got.shape != want.shape:
            raise ValueError(f"{where}: the shape is {tuple(got.shape)}, {tuple(want.shape)} was expected")
        if want.numel():
            got, want = got.detach().double(), want.detach().double()
            self.found.append((float((got - want).abs().max() / want.abs().max().clamp(min=1e-12)), where))

    def finding(self, good: str, tolerance: float) -> ContractFinding:
        """`passed` is the sentence where all agree; otherwise it names the first place that does not."""
        # a NaN is worse than any number
        worst = max((apart for apart, _ in self.found), key=lambda apart: (math.isnan(apart), apart), default=0.0)
        # not "above the tolerance", which no NaN is
        bad = [(apart, where) for apart, where in self.found if not apart <= tolerance]
        if not bad:
            return passed(good, worst, tolerance)
        first, where = bad[0]
        return failed(f"{where}: {first:.1e} apart, one of {len(bad)} in {len(self.found)}", worst, tolerance)
