"""The layout of one new token per row whose place only tensors know, so that the same operators serve every step."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jaxtyping import Int
from torch import Tensor

if TYPE_CHECKING:
    from manyformer.core import TokenPositions


@dataclass(frozen=True, eq=False)
class StepLayout:
    """One token per row that continues the row's document; no number of it may be read on the host.

    Layers store the token in `column` of their caches, the same of every row, which have a column for each of `keys`:
    the tokens so far and the new one; unused columns are padding. Positions are below `position_limit`. `masks` are the
    dense masks of `keys` that the layers of one step share."""

    column: Int[Tensor, " b"]
    keys: "TokenPositions"
    position_limit: int
    masks: dict[Any, Tensor] = field(default_factory=dict)
