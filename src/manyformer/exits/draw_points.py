"""Tables and plots of early-exit sweeps: quality against layers per token and against speed, one line per model."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from manyformer.exits.sweep import ThresholdPoint, speedups
from manyformer.files.atomic_files import atomic_write_text, make_folder
from manyformer.files.json_text import json_text
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


TABLE_HEADER = ("model", "threshold", "BLEU", "consistency", "layers", "tokens/s", "times as fast")


def table_rows(points: Sequence[ThresholdPoint]) -> list[tuple[str, ...]]:
    """One table row per point; the last column is the speed relative to the same model without early exits."""
    return [
        (
            point.model,
            point.label,
            "" if point.bleu is None else f"{point.bleu:.1f}",
            f"{point.consistency:.3f}",
            f"{point.layers:.2f}",
            f"{point.tokens_per_second:.0f}",
            f"{speedup:.2f}" if speedup else "",
        )
        for point, speedup in zip(points, speedups(points))
    ]


def write_points(points: Sequence[ThresholdPoint], folder: Path) -> list[Path]:
    """Write the points to `folder` as a Markdown table, as JSON and as a plot, and return the paths."""
    make_folder(folder)
    files = [folder / name for name in ("early-exit.md", "early-exit.json", "early-exit.png")]
    rows = ["| " + " | ".join(row) + " |" for row in (TABLE_HEADER, ["---"] * len(TABLE_HEADER), *table_rows(points))]
    atomic_write_text(files[0], "\n".join(rows) + "\n")
    atomic_write_text(files[1], json_text([asdict(point) for point in points], indent=1, ensure_ascii=True) + "\n")
    draw_points(points, files[2])
    return files
