"""Pictures: the curves of training runs, masks, sheets of images, and the look that all drawings share."""

from manyformer.view.curves import plot_runs
from manyformer.view.patterns import draw, patterns
from manyformer.view.sheets import draw_completed, draw_samples

__all__ = ["draw", "draw_completed", "draw_samples", "patterns", "plot_runs"]
