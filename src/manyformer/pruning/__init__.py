"""Pruning of trained runs: which attention heads to remove, the scores without them, and the run that remains."""

from manyformer.pruning.prune_run import PruningResult, prune_run

__all__ = ["PruningResult", "prune_run"]
