"""Masks that choose tokens by themselves: some keys that all see, some queries that see all."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from itertools import groupby
from typing import final

import torch
from jaxtyping import Bool
from torch import Tensor

from manyformer.core import GLOBAL, Place
from manyformer.masks.base import Mask, role_of
from manyformer.masks.spans import Bounds, Span, pairs_of


class Tokens(ABC):
    """A predicate on single tokens."""

    @abstractmethod
    def __call__(self, place: Place) -> Bool[Tensor, "..."]:
        """Whether each token is one of them."""

    @abstractmethod
    def bounds(self, span: Span) -> Bounds:
        """Whether some, and whether all of a set of tokens may or must be of them."""

    def __or__(self, other: "Tokens") -> "Tokens":
        return Either(self, other)


@final
@dataclass(frozen=True)
class First(Tokens):
    """The first `count` positions of each document."""

    count: int

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f"First: there are no first {self.count} positions")

    def __call__(self, place: Place) -> Bool[Tensor, "..."]:
        return place.pos < self.count

    def bounds(self, span: Span) -> Bounds:
        return Bounds(span.first < self.count, span.last < self.count)

    def __repr__(self) -> str:
        return f"First({self.count})"


@final
@dataclass(frozen=True, init=False)
class Positions(Tokens):
    """The listed positions: `Positions(0, 7)`."""

    listed: tuple[int, ...]
    runs: tuple[tuple[int, int], ...] = field(init=False, compare=False)

    def __init__(self, *listed: int) -> None:
        numbers = tuple(sorted(set(listed)))
        object.__setattr__(self, "listed", numbers)
        # neighbours lie equally far from their numbers in the list
        groups = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
        runs = [[number for _, number in group] for _, group in groups]
        object.__setattr__(self, "runs", tuple((run[0], run[-1]) for run in runs))

    def __call__(self, place: Place) -> Bool[Tensor, "..."]:
        found = torch.zeros((), dtype=torch.bool, device=place.pos.device)
        for first, last in self.runs:
            found = found | ((place.pos >= first) & (place.pos <= last))
        return found

    def bounds(self, span: Span) -> Bounds:
        listed = torch.tensor(self.listed, dtype=torch.long, device=span.first.device)
        inside = torch.searchsorted(listed, span.last, right=True) - torch.searchsorted(listed, span.first)
        return Bounds(inside > 0, inside == span.last - span.first + 1)

    def __repr__(self) -> str:
        return f"Positions({', '.join(map(str, self.listed))})"


@final
@dataclass(frozen=True)
class Columns(Tokens):
    """The positions whose rest modulo `period` lies in `begin` .. `end` - 1 (Child et al. 2019, the fixed pattern)."""

    period: int
    begin: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.begin < self.end <= self.period:
            raise ValueError(f"{self!r}: there must be columns, 0 <= begin < end <= period")

    def __call__(self, place: Place) -> Bool[Tensor, "..."]:
        rest = place.pos % self.period
        return (rest >= self.begin) & (rest < self.end)

    def bounds(self, span: Span) -> Bounds:
        low, high = span.rest(self.period)
        return Bounds((high >= self.begin) & (low < self.end), (low >= self.begin) & (high < self.end))


@final
@dataclass(frozen=True)
class Role(Tokens):
    """The tokens whose role in their `Place` is `number`; tokens without roles have role 0."""

    number: int = GLOBAL

    def __call__(self, place: Place) -> Bool[Tensor, "..."]:
        return role_of(place) == self.number

    def bounds(self, span: Span) -> Bounds:
        low, high = span.role
        return Bounds((low <= self.number) & (high >= self.number), (low == self.number) & (high == self.number))

    def __repr__(self) -> str:
        return f"Role({self.number})"


@final
@dataclass(frozen=True)
class Either(Tokens):
    """The tokens of both: `First(1) | Role(1)`."""

    left: Tokens
    right: Tokens

    def __call__(self, place: Place) -> Bool[Tensor, "..."]:
        return self.left(place) | self.right(place)

    def bounds(self, span: Span) -> Bounds:
        left, right = self.left.bounds(span), self.right.bounds(span)
        return Bounds(left.may | right.may, left.must | right.must)

    def __repr__(self) -> str:
        return f"{self.left!r} | {self.right!r}"


@final
@dataclass(frozen=True)
class To(Mask):
    """These tokens are seen by all."""

    tokens: Tokens

    def __call__(self, h: Tensor, q: Place, k: Place) -> Bool[Tensor, "..."]:
        return self.tokens(k)

    def bounds(self, q: Span, k: Span) -> Bounds:
        return Bounds(*(bound.expand(pairs_of(q, k)) for bound in self.tokens.bounds(k)))

    @property
    def reach(self) -> int | None:
        return 0

    def __repr__(self) -> str:
        return f"To({self.tokens!r})"


@final
@dataclass(frozen=True)
class By(Mask):
    """These tokens see all."""

    tokens: Tokens

    def __call__(self, h: Tensor, q: Place, k: Place) -> Bool[Tensor, "..."]:
        return self.tokens(q)

    def bounds(self, q: Span, k: Span) -> Bounds:
        return Bounds(*(bound.expand(pairs_of(q, k)) for bound in self.tokens.bounds(q)))

    @property
    def reach(self) -> int | None:
        return 0

    def __repr__(self) -> str:
        return f"By({self.tokens!r})"


@final
@dataclass(frozen=True)
class Global(Mask):
    """These tokens see all and are seen by all (Beltagy et al. 2020, section 3.1): `By(tokens) | To(tokens)`."""

    tokens: Tokens

    def __call__(self, h: Tensor, q: Place, k: Place) -> Bool[Tensor, "..."]:
        return self.tokens(q) | self.tokens(k)

    def bounds(self, q: Span, k: Span) -> Bounds:
        return (By(self.tokens) | To(self.tokens)).bounds(q, k)

    @property
    def reach(self) -> int | None:
        return 0

    def terms(self) -> tuple[Mask, ...]:
        return (By(self.tokens), To(self.tokens))

    def __repr__(self) -> str:
        return f"Global({self.tokens!r})"
