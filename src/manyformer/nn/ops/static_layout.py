"""Token positions that are determined by their layout, so that plans can be cached by layout."""

import operator
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch.utils.weak import WeakIdKeyDictionary

from manyformer.nn.core import SUMMARY_ROLE, ContiguousLayout, PrefixedLayout, TokenPositions
from manyformer.nn.masks.mask import Mask

T = TypeVar("T")
MakeForMask = Callable[[Mask, TokenPositions, TokenPositions, int], T]
"""A function of a mask, the positions of queries and keys, and the number of heads."""


def layout_is_complete(positions: TokenPositions) -> bool:
    """Whether the layout determines everything that masks depend on."""
    if isinstance(positions.layout, PrefixedLayout):
        return positions.layout.text_layout == ContiguousLayout()
    return isinstance(positions.layout, ContiguousLayout) and not has_roles_or_parts(positions)


def can_plan(query_positions: TokenPositions, key_positions: TokenPositions) -> bool:
    """Whether a plan can be made; for meta tensors, which hold no numbers, from layouts alone."""
    if not query_positions.position_ids.is_meta:
        return True
    return layout_is_complete(query_positions) and layout_is_complete(key_positions)


def has_roles_or_parts(*token_positions: TokenPositions) -> bool:
    """Whether any of these tokens has a role or a part."""
    return any(positions.roles is not None or positions.part_ids is not None for positions in token_positions)


def cache_by_tokens(make: MakeForMask[T]) -> MakeForMask[T]:
    """Cache what `make` returns for self-attention as long as the segment tensor of the tokens exists.

    A graph that is being compiled keeps nothing of one call for the next; compilers compute equal results once."""
    results: Any = WeakIdKeyDictionary()

    @wraps(make)
    def cached(mask: Mask, query_positions: TokenPositions, key_positions: TokenPositions, heads: int) -> T:
        is_self_attention = all(map(operator.is_, query_positions, key_positions))
        if torch.compiler.is_compiling() or not is_self_attention:
            return make(mask, query_positions, key_positions, heads)
        by_key = results.setdefault(query_positions.segment_ids, {})
        # several positions, roles and parts may occur with the same segments
        tensors = (query_positions.position_ids, query_positions.roles, query_positions.part_ids)
        key = (mask, heads, *map(id, tensors))
        if key not in by_key:
            # stored with the tensors, so that their ids cannot be reused
            by_key[key] = make(mask, query_positions, key_positions, heads), tensors
        return by_key[key][0]  # type: ignore[no-any-return]

    return cached


def materialize(
    layout: ContiguousLayout | PrefixedLayout, length: int, device: torch.device | None = None
) -> TokenPositions:
    """The positions of one row of `length` tokens of this layout, as tensors."""
    column = torch.arange(length, device=device)[None]
    zeros = torch.zeros_like(column)
    if isinstance(layout, ContiguousLayout):
        return TokenPositions(column + layout.start, zeros, layout)
    is_prefix = column < layout.prefix
    position_ids = torch.where(is_prefix, column, column - layout.prefix)
    part_ids = zeros - 1
    if layout.part_length is not None:
        part_ids = torch.where(is_prefix, position_ids, position_ids // layout.part_length)
    return TokenPositions(position_ids, zeros, layout, None, is_prefix * SUMMARY_ROLE, part_ids)
