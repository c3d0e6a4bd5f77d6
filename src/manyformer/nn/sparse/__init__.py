"""Attention to keys that each query chooses."""
