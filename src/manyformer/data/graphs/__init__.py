"""Graphs: archives, neighborhoods, batches."""
