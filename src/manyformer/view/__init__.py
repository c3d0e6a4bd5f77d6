"""Pictures: the curves of training runs, and the look that all drawings share."""

from manyformer.view.curves import plot_runs

__all__ = ["plot_runs"]
