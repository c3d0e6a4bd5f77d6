"""Layers that mix tokens without comparing them: by matrices, a Fourier transform, or synthesized scores."""
