"""Attention as a layer: projections, heads, a cache of keys and values, a kernel; and variants of the layer."""
