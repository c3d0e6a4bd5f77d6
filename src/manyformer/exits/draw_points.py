"""Pictures of early exits: quality against layers and against speed, a line a model."""

from collections.abc import Sequence
from pathlib import Path

from manyformer.exits.sweep import ThresholdPoint, paces
from manyformer.view.figures import colour, panels, style, write_picture


def draw_points(points: Sequence[ThresholdPoint], path: Path) -> None:
    """Write the picture; the full model of each line is a ring."""
    figure, axes = panels(1, 2)
    scored = all(point.bleu is not None for point in points)
    for number, name in enumerate(dict.fromkeys(point.model for point in points)):
        mine = [point for point in points if point.model == name]
        values = [point.bleu if scored and point.bleu is not None else point.consistency for point in mine]
        for axis, places in zip(axes, ([p.layers for p in mine], paces(mine))):
            xs, ys = zip(*sorted(zip(places, values)))
            axis.plot(xs, ys, style(number), color=colour(number), marker="o", ms=4, lw=1.4, label=name)
            for place, value, point in zip(places, values, mine):
                if point.threshold is None:
                    axis.plot([place], [value], "o", ms=10, mfc="none", color=colour(number))
    for axis, label in zip(axes, ("layers a token, on average", "times as fast as all layers")):
        axis.set_xlabel(label)
        axis.set_ylabel("BLEU" if scored else "consistency with the full model (ROUGE-L)")
    axes[0].legend(fontsize="small")
    write_picture(figure, path)
