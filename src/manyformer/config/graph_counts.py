"""How many graphs `torch.compile` makes of a training step of each recipe, as `benchmarks/graph_counts.py` counted."""

import json
from dataclasses import dataclass
from functools import cache

from manyformer.config.shipped import COUNTED_GRAPHS


@dataclass(frozen=True)
class GraphCount:
    """The graphs of one recipe, at a tiny size."""

    graphs: int
    """The graphs of the first training step: 1 where a compiler can follow all of it."""
    ends: tuple[str, ...]
    """What the graphs end at: a function and its file, with torch's reason."""
    more: int
    """The graphs that steps of further lengths, all of them marked dynamic, add."""

    def sentence(self) -> str:
        """The count in words."""
        ends = ""
        if self.ends:
            ends = f", as they end at {'; '.join(self.ends)}"
        lengths = "; none is added for other lengths"
        if self.more:
            lengths = f"; {self.more} more for two other lengths"
        return f"{self.graphs} graph{'s' * (self.graphs != 1)}{ends}{lengths}"


@cache
def counted_graphs() -> dict[str, GraphCount]:
    """The counts by recipe; those of plug-ins, and those not counted yet, are missing."""
    record = json.loads(COUNTED_GRAPHS.read_text(encoding="utf-8"))
    return {
        name: GraphCount(count["graphs"], tuple(count["ends"]), count["more"])
        for name, count in record["recipes"].items()
    }
