"""Attention to few summaries of the keys."""
