"""What a mask is: a predicate on places with an algebra, exact for pairs and conservative for whole blocks."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from manyformer.core import PADDING, Place, tree_map
from manyformer.masks.spans import Bounds, Span, nothing_known, pairs_of

MOST_TERMS = 8
"""An expression is not multiplied out into more alternatives than this."""


class Mask(ABC):
    """A predicate: may the query at place `q` of head `h` see the key at place `k`? True means it may."""

    @abstractmethod
    def __call__(self, h: Tensor, q: Place, k: Place) -> Bool[Tensor, "..."]:
        """Elementwise over whatever shapes `h` and the fields of `q` and `k` broadcast to."""

    def bounds(self, q: Span, k: Span) -> Bounds:
        """What holds for all queries in `q` and keys in `k`, elementwise; knowing nothing is always allowed."""
        return nothing_known(q, k)

    @property
    def per_head(self) -> bool:
        """Whether heads differ; where they do not, one mask serves all of them."""
        return False

    @property
    def alike(self) -> bool:
        """Whether heads differ at most in what is drawn at random, so that what is best for one is good for all."""
        return not self.per_head

    @property
    def causal(self) -> bool:
        """Whether no key after the query can be seen, as far as the structure of the expression tells."""
        return False

    @property
    def reach(self) -> int | None:
        """How far back the distance matters: keys further behind are seen or not whatever the distance; or unknown."""
        return None

    @property
    def periods(self) -> frozenset[int]:
        """Numbers modulo which positions must agree: tokens sorted by them lie close to those that they see."""
        return frozenset()

    def head(self, number: int) -> "Mask":
        """The mask of one head."""
        return self

    def terms(self) -> tuple["Mask", ...]:
        """Masks of which this one is the union."""
        return (self,)

    def __and__(self, other: "Mask") -> "Mask":
        return And(self, other)

    def __or__(self, other: "Mask") -> "Mask":
        return Or(self, other)

    def __invert__(self) -> "Mask":
        return Not(self)

    def dense(self, at: Place, of: Place, heads: int) -> Bool[Tensor, "b h l s"]:
        """The mask written out for queries `at` and keys `of`, own segments only; h is 1 where heads agree."""
        q, k = spread(at, query=True), spread(of, query=False)
        # head by head, so that no mask need look at which heads are asked for
        kinds = [self.head(number) for number in range(heads)] if self.per_head else [self]
        numbers = torch.arange(len(kinds), device=at.pos.device)
        shape = torch.broadcast_shapes(q.pos.shape, k.pos.shape)  # type: ignore[no-untyped-call]
        seen = torch.cat([kind(number, q, k).expand(shape) for kind, number in zip(kinds, numbers)], dim=1)
        return seen & (q.seg == k.seg) & (k.seg != PADDING)


@final
@dataclass(frozen=True)
class Everything(Mask):
    """Every key of the own segment."""

    def __call__(self, h: Tensor, q: Place, k: Place) -> Bool[Tensor, "..."]:
        return torch.ones((), dtype=torch.bool, device=q.pos.device)

    def bounds(self, q: Span, k: Span) -> Bounds:
        always = torch.ones(pairs_of(q, k), dtype=torch.bool, device=q.first.device)
        return Bounds(always, always)

    @property
    def reach(self) -> int | None:
        return 0


@final
@dataclass(frozen=True)
class Nothing(Mask):
    """No key at all: the neutral element of `|`."""

    def __call__(self, h: Tensor, q: Place, k: Place) -> Bool[Tensor, "..."]:
        return torch.zeros((), dtype=torch.bool, device=q.pos.device)

    def bounds(self, q: Span, k: Span) -> Bounds:
        never = torch.zeros(pairs_of(q, k), dtype=torch.bool, device=q.first.device)
        return Bounds(never, never)

    @property
    def causal(self) -> bool:
        return True

    @property
    def reach(self) -> int | None:
        return 0

    def terms(self) -> tuple[Mask, ...]:
        return ()


@dataclass(frozen=True)
class Joined(Mask):
    """Two masks, and what holds of them however they are joined."""

    left: Mask
    right: Mask

    @property
    def per_head(self) -> bool:
        return self.left.per_head or self.right.per_head

    @property
    def alike(self) -> bool:
        return self.left.alike and self.right.alike

    @property
    def reach(self) -> int | None:
        return _farther(self.left, self.right)

    @property
    def periods(self) -> frozenset[int]:
        return self.left.periods | self.right.periods


@final
@dataclass(frozen=True)
class And(Joined):
    """What both masks allow."""

    def __call__(self, h: Tensor, q: Place, k: Place) -> Bool[Tensor, "..."]:
        return self.left(h, q, k) & self.right(h, q, k)

    def bounds(self, q: Span, k: Span) -> Bounds:
        left, right = self.left.bounds(q, k), self.right.bounds(q, k)
        return Bounds(left.may & right.may, left.must & right.must)

    @property
    def causal(self) -> bool:
        return self.left.causal or self.right.causal

    def head(self, number: int) -> Mask:
        return both(self.left.head(number), self.right.head(number))

    def terms(self) -> tuple[Mask, ...]:
        left, right = self.left.terms(), self.right.terms()
        if len(left) == len(right) == 1 or len(left) * len(right) > MOST_TERMS:
            return (self,)
        return tuple(both(a, b) for a in left for b in right)

    def __repr__(self) -> str:
        return f"{_operand(self.left, Or)} & {_operand(self.right, Or)}"


@final
@dataclass(frozen=True)
class Or(Joined):
    """What either mask allows."""

    def __call__(self, h: Tensor, q: Place, k: Place) -> Bool[Tensor, "..."]:
        return self.left(h, q, k) | self.right(h, q, k)

    def bounds(self, q: Span, k: Span) -> Bounds:
        left, right = self.left.bounds(q, k), self.right.bounds(q, k)
        return Bounds(left.may | right.may, left.must | right.must)

    @property
    def causal(self) -> bool:
        return self.left.causal and self.right.causal

    def head(self, number: int) -> Mask:
        left, right = self.left.head(number), self.right.head(number)
        if Nothing() in (left, right):
            return right if left == Nothing() else left
        return Everything() if Everything() in (left, right) else Or(left, right)

    def terms(self) -> tuple[Mask, ...]:
        return self.left.terms() + self.right.terms()

    def __repr__(self) -> str:
        return f"{self.left!r} | {self.right!r}"


@final
@dataclass(frozen=True)
class Not(Mask):
    """What the mask forbids."""

    inner: Mask

    def __call__(self, h: Tensor, q: Place, k: Place) -> Bool[Tensor, "..."]:
        return ~self.inner(h, q, k)

    def bounds(self, q: Span, k: Span) -> Bounds:
        inner = self.inner.bounds(q, k)
        return Bounds(~inner.must, ~inner.may)

    @property
    def per_head(self) -> bool:
        return self.inner.per_head

    @property
    def alike(self) -> bool:
        return self.inner.alike

    @property
    def reach(self) -> int | None:
        return self.inner.reach

    @property
    def periods(self) -> frozenset[int]:
        return self.inner.periods

    def head(self, number: int) -> Mask:
        return Not(self.inner.head(number))

    def __repr__(self) -> str:
        return f"~{_operand(self.inner, And | Or)}"


def both(left: Mask, right: Mask) -> Mask:
    """`left & right`, shorter where one of them says nothing."""
    if Nothing() in (left, right):
        return Nothing()
    if Everything() in (left, right):
        return right if left == Everything() else left
    return And(left, right)


def role_of(place: Place) -> Int[Tensor, "..."]:
    """The roles of tokens, 0 where nobody gave any."""
    return torch.zeros_like(place.pos) if place.role is None else place.role


def part_of(place: Place) -> Int[Tensor, "..."]:
    """The parts that tokens belong to, none where nobody gave any."""
    return torch.full_like(place.pos, -1) if place.part is None else place.part


def mentions(expression: Any, test: Callable[[Any], bool]) -> bool:
    """Whether the test holds of a mask, of a choice of tokens, or of any part of one."""
    if test(expression):
        return True
    if isinstance(expression, tuple):
        return any(mentions(part, test) for part in expression)
    if not is_dataclass(expression):
        return False
    return any(mentions(getattr(expression, field.name), test) for field in fields(expression))


def pick(place: Place, index: Any) -> Place:
    """The tokens of that index, whatever its shape."""
    return tree_map(lambda field: field[index], place._replace(layout=None))  # type: ignore[no-any-return]


def spread(place: Place, *, query: bool) -> Place:
    """`place` with axes for heads and for the other side, so that queries and keys broadcast to (b, h, l, s)."""
    return pick(place, (slice(None), None, slice(None), None) if query else (slice(None), None, None, slice(None)))


def _operand(mask: Mask, weaker: object) -> str:
    """`mask` as part of an expression, in brackets where it binds more weakly than its surroundings."""
    return f"({mask!r})" if isinstance(mask, weaker) else repr(mask)  # type: ignore[arg-type]


def _farther(left: Mask, right: Mask) -> int | None:
    if left.reach is None or right.reach is None:
        return None
    return max(left.reach, right.reach)
