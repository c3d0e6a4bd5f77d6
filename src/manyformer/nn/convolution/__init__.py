"""Convolutions along a text."""
