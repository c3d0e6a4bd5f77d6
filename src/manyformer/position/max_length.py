"""No position encoding, with a limit on the number of positions."""

from typing import final

from manyformer.position.position import Position


@final
class MaxLengthPosition(Position):
    """No position encoding, for models whose layers have weights for at most `max_length` positions."""

    def __init__(self, max_length: int) -> None:
        super().__init__()
        self.max_length = max_length

    def extra_repr(self) -> str:
        return f"max_length={self.max_length}"
