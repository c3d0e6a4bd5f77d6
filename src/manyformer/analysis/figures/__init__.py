"""Figures: curves of training runs, masks, mixing, attention maps, scores by length, token counts, image sheets."""

from manyformer.analysis.figures.curves import draw_scores_by_length, plot_runs
from manyformer.analysis.figures.image_sheets import draw_completed, draw_rows, draw_samples
from manyformer.analysis.figures.mask_pictures import attention_masks, draw, draw_mixing, mixing_strengths

__all__ = [
    "attention_masks",
    "draw",
    "draw_completed",
    "draw_mixing",
    "draw_rows",
    "draw_samples",
    "draw_scores_by_length",
    "mixing_strengths",
    "plot_runs",
]
