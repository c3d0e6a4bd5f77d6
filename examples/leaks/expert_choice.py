"""Experts choose their tokens: the best k of the whole sequence.

Whether a token is chosen depends on the scores of later ones. Met in expert choice routing and in Mixture-of-Depths,
which their authors train with it knowingly and decode otherwise; used in a scored model it leaks. Gradients do not show
it, because the choice is discrete: only exchanged tokens do. Mend: each token chooses by its own score.
"""

import torch
from torch import Tensor, nn

FAILS = "causal"


class Faulty(nn.Module):
    def __init__(self, vocab_size: int = 64, dim: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.router = nn.Linear(dim, 1)
        self.expert = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        scores = self.router(x)[..., 0]
        chosen = self.choose(scores)[..., None]
        return self.head(x + chosen * scores.sigmoid()[..., None] * self.expert(x))

    def choose(self, scores: Tensor) -> Tensor:
        """Which tokens (b, l) the expert computes: half of them."""
        best = scores.topk(max(scores.shape[1] // 2, 1), dim=1).indices
        return torch.zeros_like(scores).scatter(1, best, 1.0)


class Sound(Faulty):
    def choose(self, scores: Tensor) -> Tensor:
        return (scores > 0).to(scores)
