"""Plots of early-exit sweeps: quality against layers per token and against speed, one line per model."""

from collections.abc import Sequence
from pathlib import Path

from manyformer.exits.sweep import ThresholdPoint, speedups
from manyformer.view.figures import curve_color, curve_style, panels, write_picture


def draw_points(points: Sequence[ThresholdPoint], path: Path) -> None:
    """Write the plot to `path`; a ring marks the full model of each line."""
    figure, axes = panels(1, 2)
    scored = all(point.bleu is not None for point in points)
    for index, name in enumerate(dict.fromkeys(point.model for point in points)):
        model_points = [point for point in points if point.model == name]
        values = [point.bleu if scored and point.bleu is not None else point.consistency for point in model_points]
        for axis, x_values in zip(axes, ([p.layers for p in model_points], speedups(model_points))):
            xs, ys = zip(*sorted(zip(x_values, values)))
            axis.plot(xs, ys, marker="o", ms=4, lw=1.4, label=name, **curve_style(index))
            for x, value, point in zip(x_values, values, model_points):
                if point.threshold is None:
                    axis.plot([x], [value], "o", ms=10, mfc="none", color=curve_color(index))
    for axis, label in zip(axes, ("mean layers per token", "speed relative to the full model")):
        axis.set(xlabel=label, ylabel="BLEU" if scored else "consistency with the full model (ROUGE-L)")
    axes[0].legend(fontsize="small")
    write_picture(figure, path)
