"""Joins: how the output of a branch is combined with the residual stream."""

from manyformer.joins.add import AddJoin

__all__ = ["AddJoin"]
