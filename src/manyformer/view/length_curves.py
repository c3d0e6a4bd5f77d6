"""A figure of BLEU by the length of the source, for one or several models (Bahdanau et al. 2015, figure 2)."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from manyformer.scores import ScoreRecord
from manyformer.view.figures import add_legend, curve_style, panels, write_picture


def draw_scores_by_length(scores: Mapping[str, Sequence[ScoreRecord]], picture: str | Path) -> None:
    """Draw a curve for each name: the values of `bleu_by_length` over the mean number of source words of each range.

    The suffix of `picture` decides the format (.png, .svg or .pdf). Raises UserError for another suffix.
    """
    figure, (axis,) = panels(1, 1)
    for number, (name, records) in enumerate(scores.items()):
        words, values = [record.parts["words"] for record in records], [record.value for record in records]
        axis.plot(words, values, marker="o", label=name, **curve_style(number))
    axis.set_xlabel("words of the source, mean of each range")
    axis.set_ylabel("BLEU")
    add_legend(axis)
    write_picture(figure, Path(picture))
