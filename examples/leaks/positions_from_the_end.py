"""Positions are counted from the end of the sequence: outputs depend on how many tokens follow.

No token of the future is read, so that exchanged tokens show nothing; but the first n outputs of a longer sequence are
not those of its first n tokens. Training and scores of whole sequences know the distance to the end, and generation,
where the end moves, computes something else. Met with padding on the left, and with distances to the last token. Mend:
count from the beginning.
"""

import torch
from torch import Tensor, nn

FAILS = "length"


class Faulty(nn.Module):
    def __init__(self, vocab_size: int = 64, dim: int = 16, block_size: int = 512) -> None:
        super().__init__()
        self.block_size = block_size
        self.embedding = nn.Embedding(vocab_size, dim)
        self.positions = nn.Embedding(block_size, dim)
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(self.number(tokens.shape[1]))
        return self.head(x + x.cumsum(1) / torch.arange(1, tokens.shape[1] + 1)[:, None])

    def number(self, length: int) -> Tensor:
        return torch.arange(length).flip(0)


class Sound(Faulty):
    def number(self, length: int) -> Tensor:
        return torch.arange(length)
