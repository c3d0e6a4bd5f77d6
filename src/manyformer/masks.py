"""Who may look at whom: frozen predicates on places, with an algebra `&`, `|`, `~`.

A mask is a value: it prints as it reads, compares by content, and knows nothing of tensor shapes. It is asked with the
places of queries and keys, which broadcast against each other, so one definition serves full sequences, caches,
memories and gathers. Kernels always add the rule that a token sees its own segment only.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool
from torch import Tensor

from manyformer.core import PADDING, Place


class Mask(ABC):
    """A predicate: may the query at place `q` of head `h` see the key at place `k`? True means it may."""

    @abstractmethod
    def __call__(self, h: Tensor, q: Place, k: Place) -> Bool[Tensor, "..."]:
        """Elementwise over whatever shapes `h` and the fields of `q` and `k` broadcast to."""

    @property
    def per_head(self) -> bool:
        """Whether heads differ; where they do not, one mask serves all of them."""
        return False

    @property
    def causal(self) -> bool:
        """Whether no key after the query can be seen, as far as the structure of the expression tells."""
        return False

    def __and__(self, other: "Mask") -> "Mask":
        return And(self, other)

    def __or__(self, other: "Mask") -> "Mask":
        return Or(self, other)

    def __invert__(self) -> "Mask":
        return Not(self)

    def dense(self, at: Place, of: Place, heads: int) -> Bool[Tensor, "b h l s"]:
        """The mask written out for queries `at` and keys `of`, own segments only; h is 1 where heads agree."""
        q, k = _spread(at, query=True), _spread(of, query=False)
        number = torch.arange(heads if self.per_head else 1, device=at.pos.device)[:, None, None]
        return self(number, q, k) & (q.seg == k.seg) & (k.seg != PADDING)


@final
@dataclass(frozen=True)
class Everything(Mask):
    """Every key of the own segment."""

    def __call__(self, h: Tensor, q: Place, k: Place) -> Bool[Tensor, "..."]:
        return torch.ones((), dtype=torch.bool, device=q.pos.device)


@final
@dataclass(frozen=True)
class Nothing(Mask):
    """No key at all: the neutral element of `|`."""

    def __call__(self, h: Tensor, q: Place, k: Place) -> Bool[Tensor, "..."]:
        return torch.zeros((), dtype=torch.bool, device=q.pos.device)

    @property
    def causal(self) -> bool:
        return True


@final
@dataclass(frozen=True)
class Causal(Mask):
    """The past and the present (Vaswani et al. 2017, section 3.2.3)."""

    def __call__(self, h: Tensor, q: Place, k: Place) -> Bool[Tensor, "..."]:
        return k.pos <= q.pos

    @property
    def causal(self) -> bool:
        return True


@final
@dataclass(frozen=True)
class Document(Mask):
    """The own document. Kernels apply it anyway; written out it can be negated or drawn."""

    def __call__(self, h: Tensor, q: Place, k: Place) -> Bool[Tensor, "..."]:
        return q.seg == k.seg


@final
@dataclass(frozen=True)
class And(Mask):
    """What both masks allow."""

    left: Mask
    right: Mask

    def __call__(self, h: Tensor, q: Place, k: Place) -> Bool[Tensor, "..."]:
        return self.left(h, q, k) & self.right(h, q, k)

    @property
    def per_head(self) -> bool:
        return self.left.per_head or self.right.per_head

    @property
    def causal(self) -> bool:
        return self.left.causal or self.right.causal

    def __repr__(self) -> str:
        return f"{_operand(self.left, Or)} & {_operand(self.right, Or)}"


@final
@dataclass(frozen=True)
class Or(Mask):
    """What either mask allows."""

    left: Mask
    right: Mask

    def __call__(self, h: Tensor, q: Place, k: Place) -> Bool[Tensor, "..."]:
        return self.left(h, q, k) | self.right(h, q, k)

    @property
    def per_head(self) -> bool:
        return self.left.per_head or self.right.per_head

    @property
    def causal(self) -> bool:
        return self.left.causal and self.right.causal

    def __repr__(self) -> str:
        return f"{self.left!r} | {self.right!r}"


@final
@dataclass(frozen=True)
class Not(Mask):
    """What the mask forbids."""

    inner: Mask

    def __call__(self, h: Tensor, q: Place, k: Place) -> Bool[Tensor, "..."]:
        return ~self.inner(h, q, k)

    @property
    def per_head(self) -> bool:
        return self.inner.per_head

    def __repr__(self) -> str:
        return f"~{_operand(self.inner, And | Or)}"


@final
@dataclass(frozen=True, init=False)
class Heads(Mask):
    """A mask for each head by its number, and one for the rest: `Heads({0: Causal()}, rest=Nothing())`."""

    masks: tuple[tuple[int, Mask], ...]
    rest: Mask

    def __init__(self, masks: Mapping[int, Mask], *, rest: Mask | None = None) -> None:
        for head in masks:
            if head < 0:
                raise ValueError(f"Heads: head {head} does not exist; heads are numbered from 0")
        object.__setattr__(self, "masks", tuple(sorted(masks.items())))
        object.__setattr__(self, "rest", Nothing() if rest is None else rest)

    def __call__(self, h: Tensor, q: Place, k: Place) -> Bool[Tensor, "..."]:
        seen = self.rest(h, q, k)
        for head, mask in self.masks:
            seen = torch.where(h == head, mask(h, q, k), seen)
        return seen

    @property
    def per_head(self) -> bool:
        return True

    @property
    def causal(self) -> bool:
        return self.rest.causal and all(mask.causal for _, mask in self.masks)

    def __repr__(self) -> str:
        named = ", ".join(f"{head}: {mask!r}" for head, mask in self.masks)
        return f"Heads({{{named}}}, rest={self.rest!r})"


def _operand(mask: Mask, weaker: object) -> str:
    """`mask` as part of an expression, in brackets where it binds more weakly than its surroundings."""
    return f"({mask!r})" if isinstance(mask, weaker) else repr(mask)  # type: ignore[arg-type]


def _spread(place: Place, *, query: bool) -> Place:
    """`place` with axes for heads and for the other side, so that queries and keys broadcast to (b, h, l, s)."""
    index = (slice(None), None, slice(None), None) if query else (slice(None), None, None, slice(None))
    return Place(place.pos[index], place.seg[index])
