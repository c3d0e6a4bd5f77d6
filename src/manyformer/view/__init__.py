"""Pictures: the curves of training runs, masks, sheets of images, and the look that all drawings share."""

from manyformer.view.curves import plot_runs
from manyformer.view.image_sheets import draw_completed, draw_samples
from manyformer.view.mask_pictures import draw, patterns

__all__ = ["draw", "draw_completed", "draw_samples", "patterns", "plot_runs"]
