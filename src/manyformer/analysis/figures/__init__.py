"""Figures: curves of training runs, masks, mixing, attention maps, scores by length, token counts, image sheets."""

from typing import TYPE_CHECKING

from manyformer.base.lazy_names import offer_names as _offer_names

if TYPE_CHECKING:
    from manyformer.analysis.figures.curves import draw_scores_by_length, plot_runs
    from manyformer.analysis.figures.image_sheets import draw_completed, draw_rows, draw_samples
    from manyformer.analysis.figures.mask_pictures import attention_masks, draw, draw_mixing, mixing_strengths

_MODULES = {
    "attention_masks": "manyformer.analysis.figures.mask_pictures",
    "draw": "manyformer.analysis.figures.mask_pictures",
    "draw_completed": "manyformer.analysis.figures.image_sheets",
    "draw_mixing": "manyformer.analysis.figures.mask_pictures",
    "draw_rows": "manyformer.analysis.figures.image_sheets",
    "draw_samples": "manyformer.analysis.figures.image_sheets",
    "draw_scores_by_length": "manyformer.analysis.figures.curves",
    "mixing_strengths": "manyformer.analysis.figures.mask_pictures",
    "plot_runs": "manyformer.analysis.figures.curves",
}

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


_offer_names(__name__, _MODULES)
