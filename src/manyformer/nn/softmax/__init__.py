"""Softmax attention: its kernels, the table of its paths, and the operators of each path."""
