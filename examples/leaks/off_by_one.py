"""A shift or a mask is one token off, so that a token reads the one that it is to predict.

tril(1) instead of tril(0), a shift to the left instead of the right, labels shifted by the caller and by the model: the
loss of such a model goes to zero within minutes. Met in each reimplementation once. Mend: the line, and a check.
"""

import torch
from torch import Tensor, nn

FAILS = "causal"


class Faulty(nn.Module):
    diagonal = 1

    def __init__(self, vocab_size: int = 64, dim: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        queries, keys, values = self.qkv(x).chunk(3, dim=-1)
        allowed = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(self.diagonal)
        return self.head(x + nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=allowed))


class Sound(Faulty):
    diagonal = 0
