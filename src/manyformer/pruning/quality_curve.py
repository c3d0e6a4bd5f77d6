"""The scores of a model against the number of its heads, as a file and as a picture."""

from pathlib import Path
from typing import Annotated, NamedTuple

from manyformer.files.json_records import AS_OBJECT, Count, FileRecord
from manyformer.view.figures import panels, write_picture

CURVE_FILE, CURVE_PICTURE = "pruning.json", "pruning.png"


class PruningPoint(NamedTuple):
    """The scores on the validation data with this number of heads; `removed` is text for `parse_heads`."""

    heads: int
    removed: str
    scores: dict[str, float]


class QualityCurve(FileRecord):
    """The content of pruning.json: the points from all heads down, the way of ranking and the pruned part."""

    title = "the scores of a pruned model"
    format_number = 1
    how: str
    part: str | None
    metric: str
    total: Count
    points: list[Annotated[PruningPoint, AS_OBJECT]]

    def draw(self, path: Path) -> None:
        """Draw the metric against the number of heads."""
        from matplotlib.ticker import MaxNLocator

        figure, (axis,) = panels(1, 1)
        heads, values = zip(*((point.heads, point.scores[self.metric]) for point in self.points))
        axis.plot(heads, values, marker="o", ms=4, lw=1.4)
        axis.axhline(values[0], color="#999999", lw=0.8, ls="--")
        where = "" if self.part is None else f" in {self.part}"
        axis.set(xlabel=f"heads of {self.total}{where}, removed by {self.how}", ylabel=f"{self.metric} (validation)")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.invert_xaxis()
        write_picture(figure, path)
