"""Layers over the edges of graphs."""
