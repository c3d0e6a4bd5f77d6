"""One number for each token, such as its recurrent steps or its exit layer, as a figure and as text."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from manyformer.view.figures import check_picture, curve_color, panels, write_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TOKENS_PER_ROW = 40
"""Tokens per row of a figure; longer texts have several rows."""

TOKEN_INCHES = 0.28
"""The width of a token in a figure."""

MAX_BAR_LENGTH = 24
"""The most characters of a bar in the text output."""

COLORMAP = "Blues"


class TokenCounts(NamedTuple):
    """The tokens that one part of a model processed, a number for each, and the largest possible number.

    `label` is the unit of the numbers. With probabilistic halting, `halting` has the halting probabilities of each
    token at each of its steps.
    """

    title: str
    tokens: tuple[str, ...]
    numbers: tuple[float, ...]
    maximum: float
    label: str = "steps"
    halting: tuple[tuple[float, ...], ...] | None = None

    @property
    def mean(self) -> float:
        return sum(self.numbers) / max(1, len(self.numbers))


def describe_counts(counts: TokenCounts) -> str:
    """The counts as text: a line for each token, with its number as a bar."""
    label_width = max(map(len, counts.tokens))
    bar_length = min(MAX_BAR_LENGTH, max(1, round(counts.maximum)))
    lines = []
    for token, number in zip(counts.tokens, counts.numbers):
        bar = "█" * round(bar_length * number / max(counts.maximum, 1e-9))
        lines.append(f"{token:>{label_width}} {bar:<{bar_length}} {number:g}")
    return "\n".join(lines)


def draw_counts(all_counts: Sequence[TokenCounts], path: str | Path) -> None:
    """Draw several counts below each other; the suffix of `path` decides the format.

    Steps with halting probabilities are drawn as cells, which are darker for larger probabilities.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.ticker import MaxNLocator

    check_picture(Path(path))
    rows = [(counts, start) for counts in all_counts for start in range(0, len(counts.tokens), TOKENS_PER_ROW)]
    row_length = min(TOKENS_PER_ROW, max(len(counts.tokens) for counts in all_counts))
    figure, axes = panels(len(rows), 1, (max(4.0, row_length * TOKEN_INCHES + 1.2), 2.3), grid=False)
    for axis, (counts, start) in zip(axes, rows):
        names = counts.tokens[start : start + TOKENS_PER_ROW]
        _draw_bars(axis, counts, slice(start, start + TOKENS_PER_ROW))
        # matplotlib does not accept empty labels, and $ would start a formula
        axis.set_xticks(range(len(names)), [name.replace("$", r"\$") or " " for name in names], rotation=90, fontsize=8)
        axis.set(xlim=(-0.6, row_length - 0.4), ylim=(0, counts.maximum * 1.05))
        axis.set_ylabel(counts.label, fontsize=8)
        axis.yaxis.set_major_locator(MaxNLocator(integer=True))
        axis.spines[["top", "right"]].set_visible(False)
        if start == 0 and counts.title:
            axis.set_title(f"{counts.title}, mean {counts.mean:.2f}", fontsize=9)
    if any(counts.halting for counts in all_counts):
        colorbar = figure.colorbar(ScalarMappable(cmap=COLORMAP), ax=axes, aspect=30, pad=0.01)
        colorbar.set_label("probability of halting", fontsize=8)
    write_picture(figure, Path(path))


def _draw_bars(axis: "Axes", counts: TokenCounts, columns: slice) -> None:
    """Draw a bar for each token, or a stack of cells if there are halting probabilities."""
    from matplotlib import colormaps

    numbers = counts.numbers[columns]
    if counts.halting is None:
        axis.bar(range(len(numbers)), numbers, color=curve_color(0), width=0.8)
        return
    cells = [
        (x, step, probability)
        for x, probabilities in enumerate(counts.halting[columns])
        for step, probability in enumerate(probabilities)
    ]
    if cells:
        xs, steps, cell_probabilities = zip(*cells)
        colors = colormaps[COLORMAP](cell_probabilities)
        axis.bar(xs, [1.0] * len(xs), bottom=steps, width=0.86, color=colors, edgecolor="#888888", lw=0.4)
