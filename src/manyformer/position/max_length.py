"""No positions, but not of any number of tokens."""

from typing import final

from manyformer.position.position import Position


@final
class MaxLengthPosition(Position):
    """Positions enter nowhere, and there are `max_length` of them: for models whose layers know no more."""

    def __init__(self, max_length: int) -> None:
        super().__init__()
        self.max_length = max_length

    def extra_repr(self) -> str:
        return f"longest={self.max_length}"
