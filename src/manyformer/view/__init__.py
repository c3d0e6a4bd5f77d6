"""Pictures: the curves of training runs, masks, and the look that all drawings share."""

from manyformer.view.curves import plot_runs
from manyformer.view.patterns import draw, patterns

__all__ = ["draw", "patterns", "plot_runs"]
