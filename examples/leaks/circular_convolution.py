"""A long convolution by FFT wraps around: the last tokens come back before the first.

The product of two spectra of n points is a circular convolution, y[t] = sum over s of h[s] x[(t - s) mod n]. It is a
causal one only if n is at least the length of the sequence plus that of the filter, less one.
Met in zoology's `LongConvolution`, whose filter is longer than the padding unless a sequence has full length. Mend: as
many zeros as the filter has taps.
"""

import torch
from torch import Tensor, nn

FAILS = "causal"


class Faulty(nn.Module):
    def __init__(self, vocab_size: int = 64, dim: int = 16, taps: int = 1024) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.filter = nn.Parameter(torch.randn(dim, taps) / taps**0.5)
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        points = self.points(x.shape[1])
        signal = torch.fft.rfft(x.mT, n=points)
        response = torch.fft.rfft(self.filter[:, : x.shape[1]], n=points)
        mixed = torch.fft.irfft(signal * response, n=points)[..., : x.shape[1]]
        return self.head(x + mixed.mT)

    def points(self, length: int) -> int:
        return length


class Sound(Faulty):
    def points(self, length: int) -> int:
        return 2 * length
