"""Recorded episodes: archives and windows."""
