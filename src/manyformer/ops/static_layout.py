"""Token positions that are determined by their layout, so that plans can be cached by layout."""

import torch

from manyformer.core import SUMMARY_ROLE, ContiguousLayout, PrefixedLayout, TokenPositions


def layout_is_complete(positions: TokenPositions) -> bool:
    """Whether the layout determines everything that masks depend on."""
    if isinstance(positions.layout, PrefixedLayout):
        return positions.layout.text_layout == ContiguousLayout()
    return isinstance(positions.layout, ContiguousLayout) and not has_roles_or_parts(positions)


def can_plan(query_positions: TokenPositions, key_positions: TokenPositions) -> bool:
    """Whether a plan can be made; for meta tensors, which hold no numbers, from layouts alone."""
    return not query_positions.position_ids.is_meta or (
        layout_is_complete(query_positions) and layout_is_complete(key_positions)
    )


def has_roles_or_parts(*token_positions: TokenPositions) -> bool:
    """Whether any of these tokens has a role or a part."""
    return any(positions.roles is not None or positions.part_ids is not None for positions in token_positions)


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
    part_ids = (
        zeros - 1
        if layout.part_length is None
        else torch.where(is_prefix, position_ids, position_ids // layout.part_length)
    )
    return TokenPositions(position_ids, zeros, layout, None, is_prefix * SUMMARY_ROLE, part_ids)
