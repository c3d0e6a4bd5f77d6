"""Figures: curves of training runs, masks, attention maps, scores by length, token counts and sheets of images."""

from manyformer.view.curves import plot_runs
from manyformer.view.image_sheets import draw_completed, draw_samples
from manyformer.view.length_curves import draw_scores_by_length
from manyformer.view.mask_pictures import attention_masks, draw

__all__ = ["attention_masks", "draw", "draw_completed", "draw_samples", "draw_scores_by_length", "plot_runs"]
