"""Sets of tokens, and masks in which such tokens are visible to all queries or attend to all keys."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from itertools import groupby
from typing import final

import torch
from jaxtyping import Bool
from torch import Tensor

from manyformer.nn.core import GLOBAL_ROLE, TokenPositions
from manyformer.nn.masks.mask import Mask, TokenBounds, VisibilityBounds, pair_shape, roles_of
from manyformer.nn.runtime.device_reads import ConstantTensor


class TokenSet(ABC):
    """A predicate on single tokens."""

    @abstractmethod
    def __call__(self, positions: TokenPositions) -> Bool[Tensor, "..."]:
        """Whether each token is in the set."""

    @abstractmethod
    def bounds(self, tokens: TokenBounds) -> VisibilityBounds:
        """Whether any of the tokens may be in the set, and whether all of them surely are."""

    def __or__(self, right: "TokenSet") -> "TokenSet":
        return TokenUnion(self, right)


@final
@dataclass(frozen=True)
class FirstTokens(TokenSet):
    """The first `count` positions of each document."""

    count: int

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f"FirstTokens: count ({self.count}) must be at least 0")

    def __call__(self, positions: TokenPositions) -> Bool[Tensor, "..."]:
        return positions.position_ids < self.count

    def bounds(self, tokens: TokenBounds) -> VisibilityBounds:
        return VisibilityBounds(tokens.first < self.count, tokens.last < self.count)

    def __repr__(self) -> str:
        return f"FirstTokens({self.count})"


@final
@dataclass(frozen=True, init=False)
class AtPositions(TokenSet):
    """The listed positions: `AtPositions(0, 7)`."""

    positions: tuple[int, ...]
    runs: tuple[tuple[int, int], ...] = field(init=False, compare=False)
    members: ConstantTensor = field(init=False, repr=False, compare=False)

    def __init__(self, *positions: int) -> None:
        ordered = tuple(sorted(set(positions)))
        object.__setattr__(self, "positions", ordered)
        object.__setattr__(self, "members", ConstantTensor(ordered, torch.long))
        # consecutive positions have the same difference from their index in the list
        groups = groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0])
        runs = [[position for _, position in group] for _, group in groups]
        object.__setattr__(self, "runs", tuple((run[0], run[-1]) for run in runs))

    def __call__(self, positions: TokenPositions) -> Bool[Tensor, "..."]:
        contained = torch.zeros((), dtype=torch.bool, device=positions.position_ids.device)
        # by runs: listed positions are often a few blocks, and each run costs two comparisons
        for first, last in self.runs:
            contained = contained | ((positions.position_ids >= first) & (positions.position_ids <= last))
        return contained

    def bounds(self, tokens: TokenBounds) -> VisibilityBounds:
        member_positions = self.members.on(tokens.first.device)
        # members within the bounds; all tokens are in the set only if every position between the bounds is
        member_count = torch.searchsorted(member_positions, tokens.last, right=True) - torch.searchsorted(
            member_positions, tokens.first
        )
        return VisibilityBounds(member_count > 0, member_count == tokens.last - tokens.first + 1)

    def __repr__(self) -> str:
        return f"AtPositions({', '.join(map(str, self.positions))})"


@final
@dataclass(frozen=True)
class PeriodicTokens(TokenSet):
    """The positions whose residue modulo `period` is in `start` .. `stop` - 1 (Child et al. 2019, fixed pattern)."""

    period: int
    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop <= self.period:
            raise ValueError(f"{self!r}: start and stop must satisfy 0 <= start < stop <= period")

    def __call__(self, positions: TokenPositions) -> Bool[Tensor, "..."]:
        residue = positions.position_ids % self.period
        return (residue >= self.start) & (residue < self.stop)

    def bounds(self, tokens: TokenBounds) -> VisibilityBounds:
        # residues of a set lie between these bounds, of which one end alone may be inside
        low, high = tokens.residue_bounds(self.period)
        return VisibilityBounds((high >= self.start) & (low < self.stop), (low >= self.start) & (high < self.stop))


@final
@dataclass(frozen=True)
class WithRole(TokenSet):
    """The tokens whose role in their `TokenPositions` is `role`; tokens without roles have role 0."""

    role: int = GLOBAL_ROLE

    def __call__(self, positions: TokenPositions) -> Bool[Tensor, "..."]:
        return roles_of(positions) == self.role

    def bounds(self, tokens: TokenBounds) -> VisibilityBounds:
        low, high = tokens.roles
        return VisibilityBounds((low <= self.role) & (high >= self.role), (low == self.role) & (high == self.role))

    def __repr__(self) -> str:
        return f"WithRole({self.role})"


@final
@dataclass(frozen=True)
class TokenUnion(TokenSet):
    """The union of two token sets: `FirstTokens(1) | WithRole(1)`."""

    left: TokenSet
    right: TokenSet

    def __call__(self, positions: TokenPositions) -> Bool[Tensor, "..."]:
        return self.left(positions) | self.right(positions)

    def bounds(self, tokens: TokenBounds) -> VisibilityBounds:
        left = self.left.bounds(tokens)
        right = self.right.bounds(tokens)
        return VisibilityBounds(left.any_visible | right.any_visible, left.all_visible | right.all_visible)

    def __repr__(self) -> str:
        return f"{self.left!r} | {self.right!r}"


@final
@dataclass(frozen=True)
class VisibleToAll(Mask):
    """Keys in `tokens` are visible to every query."""

    tokens: TokenSet
    max_lookback = 0

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        return self.tokens(k)

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        return VisibilityBounds(*(bound.expand(pair_shape(q, k)) for bound in self.tokens.bounds(k)))

    def __repr__(self) -> str:
        return f"VisibleToAll({self.tokens!r})"


@final
@dataclass(frozen=True)
class AttendsToAll(Mask):
    """Queries in `tokens` attend to every key."""

    tokens: TokenSet
    max_lookback = 0

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        return self.tokens(q)

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        return VisibilityBounds(*(bound.expand(pair_shape(q, k)) for bound in self.tokens.bounds(q)))

    def __repr__(self) -> str:
        return f"AttendsToAll({self.tokens!r})"


@final
@dataclass(frozen=True)
class GlobalTokens(Mask):
    """`tokens` attend to every key and are visible to every query (Beltagy et al. 2020, section 3.1).

    Equals `AttendsToAll(tokens) | VisibleToAll(tokens)`.
    """

    tokens: TokenSet
    max_lookback = 0

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        # one mask instead of a union, because it is what papers call a global token; planners take it apart again
        return self.tokens(q) | self.tokens(k)

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        return (AttendsToAll(self.tokens) | VisibleToAll(self.tokens)).bounds(q, k)

    def disjuncts(self) -> tuple[Mask, ...]:
        return (AttendsToAll(self.tokens), VisibleToAll(self.tokens))

    def __repr__(self) -> str:
        return f"GlobalTokens({self.tokens!r})"
