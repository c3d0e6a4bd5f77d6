"""The spaces of observations and actions that an environment has and a policy is built for."""

import re
from dataclasses import dataclass

from manyformer.base.errors import UserError

MAX_PIXEL_VALUES = 1 << 24
"""The largest number of values of an image that a policy observes."""


@dataclass(frozen=True)
class VectorSpace:
    """Observations that are vectors of `size` numbers."""

    size: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one observation."""
        return (self.size,)

    @property
    def keyword(self) -> int | str:
        """The keyword `observations` of a recipe for this space."""
        return self.size


@dataclass(frozen=True)
class PixelSpace:
    """Observations that are images of bytes with channels last."""

    height: int
    width: int
    channels: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one observation."""
        return (self.height, self.width, self.channels)

    @property
    def keyword(self) -> int | str:
        """The keyword `observations` of a recipe for this space."""
        return f"{self.height}x{self.width}x{self.channels}"


@dataclass(frozen=True)
class DiscreteActions:
    """Actions 0 to `size` - 1."""

    size: int


@dataclass(frozen=True)
class BoxActions:
    """Actions that are vectors of `size` numbers, each between its entries in `low` and `high`."""

    size: int
    low: tuple[float, ...]
    high: tuple[float, ...]


ObservationSpace = VectorSpace | PixelSpace
ActionSpace = DiscreteActions | BoxActions


def parse_observations(keyword: int | str) -> ObservationSpace:
    """The space that the keyword `observations` of a recipe names, 8 or "64x64x3". Raises UserError."""
    if isinstance(keyword, int) and keyword >= 1:
        return VectorSpace(keyword)
    # no leading zeros, and few enough digits that the product is a number of reasonable size
    if match := re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})x([1-9]\d{0,5})", str(keyword)):
        height, width, channels = map(int, match.groups())
        if height * width * channels <= MAX_PIXEL_VALUES:
            return PixelSpace(height, width, channels)
        raise UserError(f"observations ({keyword!r}) must have at most {MAX_PIXEL_VALUES:,} values in an image")
    raise UserError(
        f"observations ({keyword!r}) must be the size of a vector, such as 8, or HEIGHTxWIDTHxCHANNELS of images, such "
        "as 64x64x3"
    )
