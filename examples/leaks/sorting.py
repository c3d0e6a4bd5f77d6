"""Tokens are sorted by a score and mixed with their neighbors in that order.

A rank counts later tokens too. Met in sorted, hashed and clustered attention (Sinkhorn, Reformer, Routing) without a
mask by the original positions. Mend: keep the positions, and attend to those that are not later.
"""

import torch
from torch import Tensor, nn

FAILS = "causal"


class Faulty(nn.Module):
    masked = False

    def __init__(self, vocab_size: int = 64, dim: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.score = nn.Linear(dim, 1)
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        scores = self.score(x)[..., 0]
        # the distance of two tokens in the sorted order, for each pair (b, l, l)
        ranks = scores.argsort(1).argsort(1)
        near = (ranks[:, :, None] - ranks[:, None, :]).abs() <= 2
        if self.masked:
            # by their scores instead of their ranks: a distance of two tokens knows no third one
            near = (scores[:, :, None] - scores[:, None, :]).abs() <= 0.2
            near = near & torch.ones_like(near).tril()
        weights = near / near.sum(-1, keepdim=True)
        return self.head(x + weights.to(x) @ (x * scores.sigmoid()[..., None]))


class Sound(Faulty):
    masked = True
