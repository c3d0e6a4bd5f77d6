"""Honest though it looks wrong: Mixture-of-Depths chooses the best tokens of a sequence in training.

Which tokens a layer computes is then decided over the whole sequence, and `causal-training` fails, as the paper says
itself. In evaluation a predictor decides for each token from that token alone: `causal` and every score are right. The
training loss is a little too good; compare models by their scores in evaluation mode.
"""

import torch
from torch import Tensor, nn

LOOKS_LIKE = "causal-training"


class Model(nn.Module):
    def __init__(self, vocab_size: int = 64, dim: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.router = nn.Linear(dim, 1)
        self.predictor = nn.Linear(dim, 1)
        self.layer = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        scores = self.router(x)[..., 0]
        if self.training:
            best = scores.topk(max(scores.shape[1] // 2, 1), dim=1).indices
            chosen = torch.zeros_like(scores).scatter(1, best, 1.0)
        else:
            # learns to say whether the router would choose the token
            chosen = (self.predictor(x)[..., 0] > 0).to(x)
        return self.head(x + (chosen * scores)[..., None] * self.layer(x))
