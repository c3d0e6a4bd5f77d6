"""What a mask is: a predicate on places with an algebra, exact for pairs and conservative for whole blocks."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from manyformer.core import PADDING_SEGMENT, TokenPositions, tree_map
from manyformer.masks.bounds import TokenBounds, VisibilityBounds, no_bounds, pairs_of

MOST_TERMS = 8
"""An expression is not multiplied out into more alternatives than this."""


class Mask(ABC):
    """A predicate: may the query at place `q` of head `h` see the key at place `k`? True means it may."""

    @abstractmethod
    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        """Elementwise over whatever shapes `h` and the fields of `q` and `k` broadcast to."""

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        """What holds for all queries in `q` and keys in `k`, elementwise; knowing nothing is always allowed."""
        return no_bounds(q, k)

    @property
    def per_head(self) -> bool:
        """Whether heads differ; where they do not, one mask serves all of them."""
        return False

    @property
    def uniform_over_heads(self) -> bool:
        """Whether heads differ at most in what is drawn at random, so that what is best for one is good for all."""
        return not self.per_head

    @property
    def causal(self) -> bool:
        """Whether no key after the query can be seen, as far as the structure of the expression tells."""
        return False

    @property
    def max_lookback(self) -> int | None:
        """How far back the distance matters: keys further behind are seen or not whatever the distance; or unknown."""
        return None

    @property
    def periods(self) -> frozenset[int]:
        """Numbers modulo which positions must agree: tokens sorted by them lie close to those that they see."""
        return frozenset()

    def for_head(self, number: int) -> "Mask":
        """The mask of one head."""
        return self

    def disjuncts(self) -> tuple["Mask", ...]:
        """Masks of which this one is the union."""
        return (self,)

    def __and__(self, other: "Mask") -> "Mask":
        return AndMask(self, other)

    def __or__(self, other: "Mask") -> "Mask":
        return OrMask(self, other)

    def __invert__(self) -> "Mask":
        return NotMask(self)

    def dense(
        self, query_positions: TokenPositions, key_positions: TokenPositions, heads: int
    ) -> Bool[Tensor, "b h l s"]:
        """The mask written out for queries `query_positions` and keys `key_positions`, own segments only; h is 1 where
        heads agree.
        """
        q, k = broadcast_tokens(query_positions, query=True), broadcast_tokens(key_positions, query=False)
        # head by head, so that no mask need look at which heads are asked for
        kinds = [self.for_head(number) for number in range(heads)] if self.per_head else [self]
        numbers = torch.arange(len(kinds), device=query_positions.position_ids.device)
        shape = torch.broadcast_shapes(q.position_ids.shape, k.position_ids.shape)  # type: ignore[no-untyped-call]
        seen = torch.cat([kind(number, q, k).expand(shape) for kind, number in zip(kinds, numbers)], dim=1)
        return seen & (q.segment_ids == k.segment_ids) & (k.segment_ids != PADDING_SEGMENT)


@final
@dataclass(frozen=True)
class AllKeys(Mask):
    """Every key of the own segment."""

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        return torch.ones((), dtype=torch.bool, device=q.position_ids.device)

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        always = torch.ones(pairs_of(q, k), dtype=torch.bool, device=q.first.device)
        return VisibilityBounds(always, always)

    @property
    def max_lookback(self) -> int | None:
        return 0


@final
@dataclass(frozen=True)
class NoKeys(Mask):
    """No key at all: the neutral element of `|`."""

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        return torch.zeros((), dtype=torch.bool, device=q.position_ids.device)

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        never = torch.zeros(pairs_of(q, k), dtype=torch.bool, device=q.first.device)
        return VisibilityBounds(never, never)

    @property
    def causal(self) -> bool:
        return True

    @property
    def max_lookback(self) -> int | None:
        return 0

    def disjuncts(self) -> tuple[Mask, ...]:
        return ()


@dataclass(frozen=True)
class BinaryMask(Mask):
    """Two masks, and what holds of them however they are joined."""

    left: Mask
    right: Mask

    @property
    def per_head(self) -> bool:
        return self.left.per_head or self.right.per_head

    @property
    def uniform_over_heads(self) -> bool:
        return self.left.uniform_over_heads and self.right.uniform_over_heads

    @property
    def max_lookback(self) -> int | None:
        return _farther(self.left, self.right)

    @property
    def periods(self) -> frozenset[int]:
        return self.left.periods | self.right.periods


@final
@dataclass(frozen=True)
class AndMask(BinaryMask):
    """What both masks allow."""

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        return self.left(h, q, k) & self.right(h, q, k)

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        left, right = self.left.bounds(q, k), self.right.bounds(q, k)
        return VisibilityBounds(left.any_visible & right.any_visible, left.all_visible & right.all_visible)

    @property
    def causal(self) -> bool:
        return self.left.causal or self.right.causal

    def for_head(self, number: int) -> Mask:
        return simplify_and(self.left.for_head(number), self.right.for_head(number))

    def disjuncts(self) -> tuple[Mask, ...]:
        left, right = self.left.disjuncts(), self.right.disjuncts()
        if len(left) == len(right) == 1 or len(left) * len(right) > MOST_TERMS:
            return (self,)
        return tuple(simplify_and(a, b) for a in left for b in right)

    def __repr__(self) -> str:
        return f"{_operand(self.left, OrMask)} & {_operand(self.right, OrMask)}"


@final
@dataclass(frozen=True)
class OrMask(BinaryMask):
    """What either mask allows."""

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        return self.left(h, q, k) | self.right(h, q, k)

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        left, right = self.left.bounds(q, k), self.right.bounds(q, k)
        return VisibilityBounds(left.any_visible | right.any_visible, left.all_visible | right.all_visible)

    @property
    def causal(self) -> bool:
        return self.left.causal and self.right.causal

    def for_head(self, number: int) -> Mask:
        left, right = self.left.for_head(number), self.right.for_head(number)
        if NoKeys() in (left, right):
            return right if left == NoKeys() else left
        return AllKeys() if AllKeys() in (left, right) else OrMask(left, right)

    def disjuncts(self) -> tuple[Mask, ...]:
        return self.left.disjuncts() + self.right.disjuncts()

    def __repr__(self) -> str:
        return f"{self.left!r} | {self.right!r}"


@final
@dataclass(frozen=True)
class NotMask(Mask):
    """What the mask forbids."""

    inner: Mask

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        return ~self.inner(h, q, k)

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        inner = self.inner.bounds(q, k)
        return VisibilityBounds(~inner.all_visible, ~inner.any_visible)

    @property
    def per_head(self) -> bool:
        return self.inner.per_head

    @property
    def uniform_over_heads(self) -> bool:
        return self.inner.uniform_over_heads

    @property
    def max_lookback(self) -> int | None:
        return self.inner.max_lookback

    @property
    def periods(self) -> frozenset[int]:
        return self.inner.periods

    def for_head(self, number: int) -> Mask:
        return NotMask(self.inner.for_head(number))

    def __repr__(self) -> str:
        return f"~{_operand(self.inner, AndMask | OrMask)}"


def simplify_and(left: Mask, right: Mask) -> Mask:
    """`left & right`, shorter where one of them says nothing."""
    if NoKeys() in (left, right):
        return NoKeys()
    if AllKeys() in (left, right):
        return right if left == AllKeys() else left
    return AndMask(left, right)


def role_of(positions: TokenPositions) -> Int[Tensor, "..."]:
    """The roles of tokens, 0 where nobody gave any."""
    return torch.zeros_like(positions.position_ids) if positions.roles is None else positions.roles


def part_of(positions: TokenPositions) -> Int[Tensor, "..."]:
    """The parts that tokens belong to, none where nobody gave any."""
    return torch.full_like(positions.position_ids, -1) if positions.part_ids is None else positions.part_ids


def any_node(expression: Any, test: Callable[[Any], bool]) -> bool:
    """Whether the test holds of a mask, of a choice of tokens, or of any part of one."""
    if test(expression):
        return True
    if isinstance(expression, tuple):
        return any(any_node(part, test) for part in expression)
    if not is_dataclass(expression):
        return False
    return any(any_node(getattr(expression, field.name), test) for field in fields(expression))


def take_tokens(positions: TokenPositions, index: Any) -> TokenPositions:
    """The tokens of that index, whatever its shape."""
    return tree_map(lambda field: field[index], positions._replace(layout=None))  # type: ignore[no-any-return]


def broadcast_tokens(positions: TokenPositions, *, query: bool) -> TokenPositions:
    """`positions` with axes for heads and for the other side, so that queries and keys broadcast to (b, h, l, s)."""
    return take_tokens(
        positions, (slice(None), None, slice(None), None) if query else (slice(None), None, None, slice(None))
    )


def _operand(mask: Mask, weaker: object) -> str:
    """`mask` as part of an expression, in brackets where it binds more weakly than its surroundings."""
    return f"({mask!r})" if isinstance(mask, weaker) else repr(mask)  # type: ignore[arg-type]


def _farther(left: Mask, right: Mask) -> int | None:
    if left.max_lookback is None or right.max_lookback is None:
        return None
    return max(left.max_lookback, right.max_lookback)
