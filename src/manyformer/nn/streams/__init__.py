"""Stacks in which branches read from and write to one residual stream or several, by a rule."""

from manyformer.nn.streams.attention_residuals import AttentionResiduals, SourceQuery
from manyformer.nn.streams.depth_skips import DepthSkips
from manyformer.nn.streams.hyper_connections import (
    Connection,
    ConnectionWeights,
    DynamicConnection,
    HyperConnections,
    StaticConnection,
)
from manyformer.nn.streams.manifold_connections import ManifoldConnection, ManifoldHead, UnmixedConnection, sinkhorn
from manyformer.nn.streams.stream_stack import BranchPlace, StreamLayer, StreamRule, StreamStack

__all__ = [
    "AttentionResiduals",
    "BranchPlace",
    "Connection",
    "ConnectionWeights",
    "DepthSkips",
    "DynamicConnection",
    "HyperConnections",
    "ManifoldConnection",
    "ManifoldHead",
    "SourceQuery",
    "StaticConnection",
    "StreamLayer",
    "StreamRule",
    "StreamStack",
    "UnmixedConnection",
    "sinkhorn",
]
