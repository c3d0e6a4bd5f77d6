"""Places of which the layout tells everything, so that plans for them can be remembered by it."""

import torch

from manyformer.core import SUMMARY_ROLE, ContiguousLayout, PrefixedLayout, TokenPositions


def layout_is_complete(positions: TokenPositions) -> bool:
    """Whether the layout tells all that masks may ask for."""
    if isinstance(positions.layout, PrefixedLayout):
        return positions.layout.text_layout == ContiguousLayout()
    return isinstance(positions.layout, ContiguousLayout) and not has_roles_or_parts(positions)


def can_plan(query_positions: TokenPositions, key_positions: TokenPositions) -> bool:
    """Whether a plan can be made: where tensors hold no numbers, as in a model without weights, from layouts alone."""
    return not query_positions.position_ids.is_meta or (
        layout_is_complete(query_positions) and layout_is_complete(key_positions)
    )


def has_roles_or_parts(*places: TokenPositions) -> bool:
    """Whether any of these tokens has a role or a part."""
    return any(place.roles is not None or place.part_ids is not None for place in places)


def materialize(
    layout: ContiguousLayout | PrefixedLayout, length: int, device: torch.device | None = None
) -> TokenPositions:
    """One row of `length` tokens, written out."""
    column = torch.arange(length, device=device)[None]
    none = torch.zeros_like(column)
    if isinstance(layout, ContiguousLayout):
        return TokenPositions(column + layout.start, none, layout)
    front = column < layout.prefix
    pos = torch.where(front, column, column - layout.prefix)
    part = none - 1 if layout.part_length is None else torch.where(front, pos, pos // layout.part_length)
    return TokenPositions(pos, none, layout, None, front * SUMMARY_ROLE, part)
