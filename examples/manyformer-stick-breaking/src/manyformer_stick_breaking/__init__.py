"""Stick-breaking attention for manyformer."""
