"""Masks and their algebra: exact for pairs of tokens, with conservative bounds for pairs of token sets.

`TokenBounds` bound the tokens of a set, a block of keys for example, and `VisibilityBounds` say of all pairs of two
sets whether any may be visible and whether all surely are: planners skip blocks by them without evaluating pairs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from manyformer.nn.core import PADDING_SEGMENT, TokenPositions, tree_map

MAX_DISJUNCTS = 8
"""A conjunction is not expanded into more disjuncts than this."""


class TokenBounds(NamedTuple):
    """Lower and upper bounds of the positions, segments, roles and parts of token sets, one set per entry.

    `residues` maps periods to bounds of the positions modulo that period, for sets that are not contiguous.
    """

    first: Int[Tensor, "*n"]
    last: Int[Tensor, "*n"]
    segments: tuple[Int[Tensor, "*n"], Int[Tensor, "*n"]]
    roles: tuple[Int[Tensor, "*n"], Int[Tensor, "*n"]]
    parts: tuple[Int[Tensor, "*n"], Int[Tensor, "*n"]]
    residues: dict[int, tuple[Tensor, Tensor]]

    def residue_bounds(self, period: int) -> tuple[Int[Tensor, "*n"], Int[Tensor, "*n"]]:
        """Bounds of the positions modulo `period`."""
        if period in self.residues:
            return self.residues[period]
        same_period = self.first // period == self.last // period
        # a set that spans the end of a period may have any residue, unless it was measured token by token
        low = torch.where(same_period, self.first % period, 0)
        return low, torch.where(same_period, self.last % period, period - 1)

    def select(self, index: Any) -> "TokenBounds":
        """The token sets at `index`."""
        return TokenBounds(*tree_map(lambda bound: bound[index], tuple(self)))


class VisibilityBounds(NamedTuple):
    """For every pair of a query set and a key set: whether any key may be visible, and whether all keys surely are."""

    any_visible: Bool[Tensor, "..."]
    all_visible: Bool[Tensor, "..."]

    def both(self, right: "VisibilityBounds") -> "VisibilityBounds":
        """The bounds of what both show."""
        return VisibilityBounds(self.any_visible & right.any_visible, self.all_visible & right.all_visible)

    def either(self, right: "VisibilityBounds") -> "VisibilityBounds":
        """The bounds of what one of them shows."""
        return VisibilityBounds(self.any_visible | right.any_visible, self.all_visible | right.all_visible)

    def inverse(self) -> "VisibilityBounds":
        """The bounds of what is not shown."""
        return VisibilityBounds(~self.all_visible, ~self.any_visible)


def no_bounds(q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
    """The bounds that hold for every mask."""
    no_pair = torch.zeros(pair_shape(q, k), dtype=torch.bool, device=q.first.device)
    return VisibilityBounds(~no_pair, no_pair)


def pair_shape(q: TokenBounds, k: TokenBounds) -> torch.Size:
    """The shape of `VisibilityBounds` of `q` and `k`."""
    shape: torch.Size = torch.broadcast_shapes(q.first.shape, k.first.shape)  # type: ignore[no-untyped-call]
    return shape


class Mask(ABC):
    """A predicate on (head `h`, query `q`, key `k`); True if the query may attend to the key."""

    @abstractmethod
    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        """Evaluate the predicate elementwise over the shape to which `h` and the fields of `q` and `k` broadcast."""

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        """Bounds for all queries in `q` and keys in `k`, elementwise; they may be loose, as `no_bounds` is."""
        return no_bounds(q, k)

    def in_head(self, head: int, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        """`for_head(head)` of `q` and `k`, without making that mask, which graphs that are compiled cannot hold."""
        # a mask that is the same in all heads does not read the head
        return self(q.position_ids, q, k)

    def bounds_in_head(self, head: int, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        """The bounds of `for_head(head)`."""
        return self.bounds(q, k)

    @property
    def per_head(self) -> bool:
        """Whether the mask depends on the head."""
        return False

    @property
    def reads_head(self) -> bool:
        """Whether a call reads the number of the head on the host; such a mask is evaluated head by head."""
        return False

    @property
    def uniform_over_heads(self) -> bool:
        """Whether heads differ in random draws at most, so that the fastest path for one head suits all."""
        return not self.per_head

    @property
    def causal(self) -> bool:
        """Whether keys after the query are never visible, judged by the structure of the expression (may be False)."""
        return False

    @property
    def max_lookback(self) -> int | None:
        """The distance to earlier keys beyond which visibility no longer depends on the distance; None if unknown."""
        return None

    @property
    def periods(self) -> frozenset[int]:
        """Moduli by which visible positions agree; sorting tokens by these residues groups them with visible keys."""
        return frozenset()

    def for_head(self, head: int) -> "Mask":
        """The mask of one head."""
        return self

    def disjuncts(self) -> tuple["Mask", ...]:
        """Masks whose union is this mask."""
        return (self,)

    def __and__(self, right: "Mask") -> "Mask":
        return AndMask(self, right)

    def __or__(self, right: "Mask") -> "Mask":
        return OrMask(self, right)

    def __invert__(self) -> "Mask":
        return NotMask(self)

    def dense(
        self, query_positions: TokenPositions, key_positions: TokenPositions, heads: int
    ) -> Bool[Tensor, "b h l s"]:
        """The mask as a tensor for queries `query_positions` and keys `key_positions`, within segments only.

        The head axis has size 1 if the mask does not depend on the head.
        """
        q = broadcast_tokens(query_positions, query=True)
        k = broadcast_tokens(key_positions, query=False)
        # head by head, so that no mask has to inspect `h`
        if self.per_head:
            head_masks = [self.for_head(head) for head in range(heads)]
        else:
            head_masks = [self]
        head_ids = torch.arange(len(head_masks), device=query_positions.position_ids.device)
        same_segment = (q.segment_ids == k.segment_ids) & (k.segment_ids != PADDING_SEGMENT)
        if same_segment.device.type == "meta":
            # there are no values to compute, and each operation would cost a millisecond of shape arithmetic
            return same_segment.expand(-1, len(head_masks), -1, -1)
        per_head = [mask(head, q, k).expand(same_segment.shape) for mask, head in zip(head_masks, head_ids)]
        return torch.cat(per_head, dim=1) & same_segment


@final
@dataclass(frozen=True)
class AllKeys(Mask):
    """Every key of the query's segment."""

    max_lookback = 0

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        return torch.ones((), dtype=torch.bool, device=q.position_ids.device)

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        every_pair = torch.ones(pair_shape(q, k), dtype=torch.bool, device=q.first.device)
        return VisibilityBounds(every_pair, every_pair)


@final
@dataclass(frozen=True)
class NoKeys(Mask):
    """No key: the neutral element of `|`."""

    causal = True
    max_lookback = 0

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        return torch.zeros((), dtype=torch.bool, device=q.position_ids.device)

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        no_pair = torch.zeros(pair_shape(q, k), dtype=torch.bool, device=q.first.device)
        return VisibilityBounds(no_pair, no_pair)

    def disjuncts(self) -> tuple[Mask, ...]:
        return ()


@dataclass(frozen=True)
class BinaryMask(Mask):
    """A mask of two operands, with the properties that `AndMask` and `OrMask` share."""

    left: Mask
    right: Mask

    @property
    def per_head(self) -> bool:
        return self.left.per_head or self.right.per_head

    @property
    def reads_head(self) -> bool:
        return self.left.reads_head or self.right.reads_head

    @property
    def uniform_over_heads(self) -> bool:
        return self.left.uniform_over_heads and self.right.uniform_over_heads

    @property
    def max_lookback(self) -> int | None:
        return widest_lookback(self.left, self.right)

    @property
    def periods(self) -> frozenset[int]:
        return self.left.periods | self.right.periods


@final
@dataclass(frozen=True)
class AndMask(BinaryMask):
    """The intersection of two masks."""

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        return self.left(h, q, k) & self.right(h, q, k)

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        return self.left.bounds(q, k).both(self.right.bounds(q, k))

    def in_head(self, head: int, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        return self.left.in_head(head, q, k) & self.right.in_head(head, q, k)

    def bounds_in_head(self, head: int, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        return self.left.bounds_in_head(head, q, k).both(self.right.bounds_in_head(head, q, k))

    @property
    def causal(self) -> bool:
        return self.left.causal or self.right.causal

    def for_head(self, head: int) -> Mask:
        return simplify_and(self.left.for_head(head), self.right.for_head(head))

    def disjuncts(self) -> tuple[Mask, ...]:
        left = self.left.disjuncts()
        right = self.right.disjuncts()
        # (a | b) & (c | d) = a & c | a & d | ...: terms that planners look at one by one, unless there are too many
        if len(left) == len(right) == 1 or len(left) * len(right) > MAX_DISJUNCTS:
            return (self,)
        return tuple(simplify_and(a, b) for a in left for b in right)

    def __repr__(self) -> str:
        return f"{_operand(self.left, OrMask)} & {_operand(self.right, OrMask)}"


@final
@dataclass(frozen=True)
class OrMask(BinaryMask):
    """The union of two masks."""

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        return self.left(h, q, k) | self.right(h, q, k)

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        return self.left.bounds(q, k).either(self.right.bounds(q, k))

    def in_head(self, head: int, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        return self.left.in_head(head, q, k) | self.right.in_head(head, q, k)

    def bounds_in_head(self, head: int, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        return self.left.bounds_in_head(head, q, k).either(self.right.bounds_in_head(head, q, k))

    @property
    def causal(self) -> bool:
        return self.left.causal and self.right.causal

    def for_head(self, head: int) -> Mask:
        left = self.left.for_head(head)
        right = self.right.for_head(head)
        if NoKeys() in (left, right):
            if left == NoKeys():
                return right
            return left
        if AllKeys() in (left, right):
            return AllKeys()
        return OrMask(left, right)

    def disjuncts(self) -> tuple[Mask, ...]:
        return self.left.disjuncts() + self.right.disjuncts()

    def __repr__(self) -> str:
        return f"{self.left!r} | {self.right!r}"


@final
@dataclass(frozen=True)
class NotMask(Mask):
    """The complement of a mask."""

    inner: Mask

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        return ~self.inner(h, q, k)

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        return self.inner.bounds(q, k).inverse()

    def in_head(self, head: int, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        return ~self.inner.in_head(head, q, k)

    def bounds_in_head(self, head: int, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        return self.inner.bounds_in_head(head, q, k).inverse()

    @property
    def per_head(self) -> bool:
        return self.inner.per_head

    @property
    def reads_head(self) -> bool:
        return self.inner.reads_head

    @property
    def uniform_over_heads(self) -> bool:
        return self.inner.uniform_over_heads

    @property
    def max_lookback(self) -> int | None:
        return self.inner.max_lookback

    @property
    def periods(self) -> frozenset[int]:
        return self.inner.periods

    def for_head(self, head: int) -> Mask:
        return NotMask(self.inner.for_head(head))

    def __repr__(self) -> str:
        return f"~{_operand(self.inner, AndMask | OrMask)}"


def union(masks: Sequence[Mask]) -> Mask:
    """The union of several masks, such as the patterns of one head (Child et al. 2019, section 4.3, "merged")."""
    result, *operands = masks
    for mask in operands:
        result = result | mask
    return result


def simplify_and(left: Mask, right: Mask) -> Mask:
    """`left & right`, simplified if one of them is `AllKeys` or `NoKeys`."""
    if NoKeys() in (left, right):
        return NoKeys()
    if AllKeys() in (left, right):
        if left == AllKeys():
            return right
        return left
    return AndMask(left, right)


def roles_of(positions: TokenPositions) -> Int[Tensor, "..."]:
    """The roles of tokens, 0 if there are none."""
    if positions.roles is None:
        return torch.zeros_like(positions.position_ids)
    return positions.roles


def part_ids_of(positions: TokenPositions) -> Int[Tensor, "..."]:
    """The part ids of tokens, -1 if there are none."""
    if positions.part_ids is None:
        # -1 is no part, and a token of no part shares one with nobody
        return torch.full_like(positions.position_ids, -1)
    return positions.part_ids


def any_node(expression: Any, predicate: Callable[[Any], bool]) -> bool:
    """Whether `predicate` holds for a mask, a token set, or any of their operands."""
    # masks and token sets are dataclasses of their operands, which may be tuples of them
    if predicate(expression):
        return True
    if isinstance(expression, tuple):
        return any(any_node(item, predicate) for item in expression)
    if not is_dataclass(expression):
        return False
    return any(any_node(getattr(expression, field.name), predicate) for field in fields(expression))


def take_tokens(positions: TokenPositions, index: Any) -> TokenPositions:
    """The positions of the tokens at `index`, of any shape, without edges, which join the tokens of whole rows."""
    kept = positions._replace(layout=None, edges=None)
    # most fields are None, in whose trees there is nothing to look for
    return TokenPositions._make(
        None if field is None else tree_map(lambda tensor: tensor[index], field) for field in kept
    )


def broadcast_tokens(positions: TokenPositions, *, query: bool) -> TokenPositions:
    """`positions` with singleton axes, so that queries and keys broadcast to (b, h, l, s)."""
    every = slice(None)
    return take_tokens(positions, (every, None, every, None) if query else (every, None, None, every))


def _operand(mask: Mask, weaker_classes: object) -> str:
    """The repr of `mask` as an operand, in brackets if its operator binds more weakly."""
    return f"({mask!r})" if isinstance(mask, weaker_classes) else repr(mask)  # type: ignore[arg-type]


def widest_lookback(*masks: Mask) -> int | None:
    """The largest `max_lookback` of several masks; None if that of one is unknown."""
    lookbacks = [mask.max_lookback for mask in masks]
    # one operand may depend on the distance without end
    if None in lookbacks:
        return None
    return max(lookback for lookback in lookbacks if lookback is not None)
