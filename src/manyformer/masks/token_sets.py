"""Masks that choose tokens by themselves: some keys that all see, some queries that see all."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from itertools import groupby
from typing import final

import torch
from jaxtyping import Bool
from torch import Tensor

from manyformer.core import GLOBAL_ROLE, TokenPositions
from manyformer.masks.bounds import TokenBounds, VisibilityBounds, pairs_of
from manyformer.masks.mask import Mask, role_of


class TokenSet(ABC):
    """A predicate on single tokens."""

    @abstractmethod
    def __call__(self, positions: TokenPositions) -> Bool[Tensor, "..."]:
        """Whether each token is one of them."""

    @abstractmethod
    def bounds(self, span: TokenBounds) -> VisibilityBounds:
        """Whether some, and whether all of a set of tokens may or must be of them."""

    def __or__(self, other: "TokenSet") -> "TokenSet":
        return TokenUnion(self, other)


@final
@dataclass(frozen=True)
class FirstTokens(TokenSet):
    """The first `count` positions of each document."""

    count: int

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f"First: there are no first {self.count} positions")

    def __call__(self, positions: TokenPositions) -> Bool[Tensor, "..."]:
        return positions.position_ids < self.count

    def bounds(self, span: TokenBounds) -> VisibilityBounds:
        return VisibilityBounds(span.first < self.count, span.last < self.count)

    def __repr__(self) -> str:
        return f"First({self.count})"


@final
@dataclass(frozen=True, init=False)
class AtPositions(TokenSet):
    """The listed positions: `AtPositions(0, 7)`."""

    listed: tuple[int, ...]
    runs: tuple[tuple[int, int], ...] = field(init=False, compare=False)

    def __init__(self, *listed: int) -> None:
        numbers = tuple(sorted(set(listed)))
        object.__setattr__(self, "listed", numbers)
        # neighbours lie equally far from their numbers in the list
        groups = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
        runs = [[number for _, number in group] for _, group in groups]
        object.__setattr__(self, "runs", tuple((run[0], run[-1]) for run in runs))

    def __call__(self, positions: TokenPositions) -> Bool[Tensor, "..."]:
        found = torch.zeros((), dtype=torch.bool, device=positions.position_ids.device)
        for first, last in self.runs:
            found = found | ((positions.position_ids >= first) & (positions.position_ids <= last))
        return found

    def bounds(self, span: TokenBounds) -> VisibilityBounds:
        listed = torch.tensor(self.listed, dtype=torch.long, device=span.first.device)
        inside = torch.searchsorted(listed, span.last, right=True) - torch.searchsorted(listed, span.first)
        return VisibilityBounds(inside > 0, inside == span.last - span.first + 1)

    def __repr__(self) -> str:
        return f"Positions({', '.join(map(str, self.listed))})"


@final
@dataclass(frozen=True)
class PeriodicTokens(TokenSet):
    """The positions whose rest modulo `period` lies in `begin` .. `end` - 1 (Child et al. 2019, the fixed pattern)."""

    period: int
    begin: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.begin < self.end <= self.period:
            raise ValueError(f"{self!r}: there must be columns, 0 <= begin < end <= period")

    def __call__(self, positions: TokenPositions) -> Bool[Tensor, "..."]:
        rest = positions.position_ids % self.period
        return (rest >= self.begin) & (rest < self.end)

    def bounds(self, span: TokenBounds) -> VisibilityBounds:
        low, high = span.rest(self.period)
        return VisibilityBounds((high >= self.begin) & (low < self.end), (low >= self.begin) & (high < self.end))


@final
@dataclass(frozen=True)
class WithRole(TokenSet):
    """The tokens whose role in their `TokenPositions` is `number`; tokens without roles have role 0."""

    number: int = GLOBAL_ROLE

    def __call__(self, positions: TokenPositions) -> Bool[Tensor, "..."]:
        return role_of(positions) == self.number

    def bounds(self, span: TokenBounds) -> VisibilityBounds:
        low, high = span.role
        return VisibilityBounds(
            (low <= self.number) & (high >= self.number), (low == self.number) & (high == self.number)
        )

    def __repr__(self) -> str:
        return f"Role({self.number})"


@final
@dataclass(frozen=True)
class TokenUnion(TokenSet):
    """The tokens of both: `FirstTokens(1) | WithRole(1)`."""

    left: TokenSet
    right: TokenSet

    def __call__(self, positions: TokenPositions) -> Bool[Tensor, "..."]:
        return self.left(positions) | self.right(positions)

    def bounds(self, span: TokenBounds) -> VisibilityBounds:
        left, right = self.left.bounds(span), self.right.bounds(span)
        return VisibilityBounds(left.any_visible | right.any_visible, left.all_visible | right.all_visible)

    def __repr__(self) -> str:
        return f"{self.left!r} | {self.right!r}"


@final
@dataclass(frozen=True)
class VisibleToAll(Mask):
    """These tokens are seen by all."""

    tokens: TokenSet

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        return self.tokens(k)

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        return VisibilityBounds(*(bound.expand(pairs_of(q, k)) for bound in self.tokens.bounds(k)))

    @property
    def max_lookback(self) -> int | None:
        return 0

    def __repr__(self) -> str:
        return f"To({self.tokens!r})"


@final
@dataclass(frozen=True)
class AttendsToAll(Mask):
    """These tokens see all."""

    tokens: TokenSet

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        return self.tokens(q)

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        return VisibilityBounds(*(bound.expand(pairs_of(q, k)) for bound in self.tokens.bounds(q)))

    @property
    def max_lookback(self) -> int | None:
        return 0

    def __repr__(self) -> str:
        return f"By({self.tokens!r})"


@final
@dataclass(frozen=True)
class GlobalTokens(Mask):
    """These tokens see all and are seen by all (Beltagy et al. 2020, section 3.1): `AttendsToAll(tokens) |
    VisibleToAll(tokens)`.
    """

    tokens: TokenSet

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        return self.tokens(q) | self.tokens(k)

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        return (AttendsToAll(self.tokens) | VisibleToAll(self.tokens)).bounds(q, k)

    @property
    def max_lookback(self) -> int | None:
        return 0

    def disjuncts(self) -> tuple[Mask, ...]:
        return (AttendsToAll(self.tokens), VisibleToAll(self.tokens))

    def __repr__(self) -> str:
        return f"Global({self.tokens!r})"
