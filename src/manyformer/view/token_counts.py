"""One number for each token, such as the steps that it took or the layer that it left at: as a drawing and as text."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from manyformer.errors import UserError
from manyformer.view.figures import check_picture, colour, write_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ACROSS = 40
"""Tokens beside each other in a drawing; a longer text goes on below."""

INCH = 0.28
"""The width of a token in a drawing."""

BAR = 24
"""A line of text holds a bar of at most this many cells."""

MAP = "Blues"


class TokenCounts(NamedTuple):
    """The tokens that one part of a model worked on, a number for each, and the largest that there could be.

    `label` is what is counted. Where tokens halt by chance, `halting` has for each of them the probability at each of
    its steps.
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


def draw_steps(
    tokens: Sequence[str],
    numbers: Sequence[float],
    *,
    most: float | None = None,
    title: str = "",
    label: str = "steps",
    path: str | Path | None = None,
) -> str:
    """A number for each token as text, a line a token; with `path` it is drawn there, too: PNG, SVG or PDF.

    `maximum` is the largest number that there could be, the largest that is there unless given. Raises UserError where
    there are no tokens, not as many numbers, or for other formats.
    """
    if not tokens or len(tokens) != len(numbers):
        raise UserError(f"{len(tokens)} tokens and {len(numbers)} numbers: there must be as many, and at least one")
    one = TokenCounts(title, tuple(tokens), tuple(numbers), max(numbers) if most is None else most, label)
    if path is not None:
        draw_counted([one], path)
    return describe_steps(one)


def describe_steps(one: TokenCounts) -> str:
    """A line for each token, with its number as a bar."""
    wide, cells = max(map(len, one.tokens)), min(BAR, max(1, round(one.maximum)))
    lines = []
    for token, number in zip(one.tokens, one.numbers):
        bar = "█" * round(cells * number / max(one.maximum, 1e-9))
        lines.append(f"{token:>{wide}} {bar:<{cells}} {number:g}")
    return "\n".join(lines)


def draw_counted(shown: Sequence[TokenCounts], path: str | Path) -> None:
    """Draw several of them below each other; the ending of `path` decides the format.

    Steps with a probability of halting are cells, the darker the likelier the token halted there.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    check_picture(Path(path))
    rows = [(one, begin) for one in shown for begin in range(0, len(one.tokens), ACROSS)]
    across = min(ACROSS, max(len(one.tokens) for one in shown))
    figure = Figure(figsize=(max(4.0, across * INCH + 1.2), 2.3 * len(rows)), layout="constrained")
    for place, (one, begin) in enumerate(rows):
        axis = figure.add_subplot(len(rows), 1, place + 1)
        names = one.tokens[begin : begin + ACROSS]
        _bars(axis, one, slice(begin, begin + ACROSS))
        # an empty line is no name to matplotlib, and $ would begin a formula
        axis.set_xticks(range(len(names)), [name.replace("$", r"\$") or " " for name in names], rotation=90, fontsize=8)
        axis.set_xlim(-0.6, across - 0.4)
        axis.set_ylim(0, one.maximum * 1.05)
        axis.set_ylabel(one.label, fontsize=8)
        axis.yaxis.set_major_locator(MaxNLocator(integer=True))
        axis.spines[["top", "right"]].set_visible(False)
        if begin == 0 and one.title:
            axis.set_title(f"{one.title}, mean {one.mean:.2f}", fontsize=9)
    if any(one.halting for one in shown):
        scale = figure.colorbar(ScalarMappable(cmap=MAP), ax=figure.axes, aspect=30, pad=0.01)
        scale.set_label("probability of halting", fontsize=8)
    write_picture(figure, Path(path))


def _bars(axis: "Axes", one: TokenCounts, part: slice) -> None:
    """A bar for each token, which is a pile of cells where the probabilities of its steps are known."""
    from matplotlib import colormaps

    numbers = one.numbers[part]
    if one.halting is None:
        axis.bar(range(len(numbers)), numbers, color=colour(0), width=0.8)
        return
    cells = [(x, step, chance) for x, mine in enumerate(one.halting[part]) for step, chance in enumerate(mine)]
    if cells:
        xs, steps, chances = zip(*cells)
        axis.bar(
            xs, [1.0] * len(xs), bottom=steps, width=0.86, color=colormaps[MAP](chances), edgecolor="#888888", lw=0.4
        )
