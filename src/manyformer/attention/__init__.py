"""Attention as a layer: projections, source, kernel and output, and its steps of one token."""

from manyformer.attention.attention import Attention, default_source, named_attention, split_heads

__all__ = ["Attention", "default_source", "named_attention", "split_heads"]
