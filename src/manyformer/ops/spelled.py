"""Places of which the layout tells everything, so that plans for them can be remembered by it."""

import torch

from manyformer.core import SUMMARY, Fronted, Place, Plain


def spelled(place: Place) -> bool:
    """Whether the layout tells all that masks may ask for."""
    if isinstance(place.layout, Fronted):
        return place.layout.behind == Plain()
    return isinstance(place.layout, Plain) and not marked(place)


def told(at: Place, of: Place) -> bool:
    """Whether a plan can be made: where tensors hold no numbers, as in a model without weights, from layouts alone."""
    return not at.pos.is_meta or (spelled(at) and spelled(of))


def marked(*places: Place) -> bool:
    """Whether any of these tokens has a role or a part."""
    return any(place.role is not None or place.part is not None for place in places)


def spell(layout: Plain | Fronted, length: int, device: torch.device | None = None) -> Place:
    """One row of `length` tokens, written out."""
    column = torch.arange(length, device=device)[None]
    none = torch.zeros_like(column)
    if isinstance(layout, Plain):
        return Place(column + layout.start, none, layout)
    front = column < layout.front
    pos = torch.where(front, column, column - layout.front)
    part = none - 1 if layout.stretch is None else torch.where(front, pos, pos // layout.stretch)
    return Place(pos, none, layout, None, front * SUMMARY, part)
