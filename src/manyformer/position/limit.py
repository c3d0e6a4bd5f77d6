"""No positions, but not of any number of tokens."""

from typing import final

from manyformer.position.base import Position


@final
class Limited(Position):
    """Positions enter nowhere, and there are `longest` of them: for models whose layers know no more."""

    def __init__(self, longest: int) -> None:
        super().__init__()
        self.longest = longest

    def extra_repr(self) -> str:
        return f"longest={self.longest}"
