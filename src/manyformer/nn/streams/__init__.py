"""Stacks in which branches read from and write to one residual stream or several, by a rule."""

from manyformer.nn.streams.depth_skips import DepthSkips
from manyformer.nn.streams.stream_stack import BranchPlace, StreamLayer, StreamRule, StreamStack

__all__ = ["BranchPlace", "DepthSkips", "StreamLayer", "StreamRule", "StreamStack"]
