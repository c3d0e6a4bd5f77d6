"""A mask of the full length is cropped at the wrong end: right for the longest sequences, open for shorter ones.

The last t rows of a triangle belong to the last positions, which may see all t tokens. Met as cached masks and slopes
that are made once and cropped in each call. A check at the full length alone passes. Mend: rows and columns from the
same position on.
"""

import torch
from torch import Tensor, nn

FAILS = "causal"


class Faulty(nn.Module):
    def __init__(self, vocab_size: int = 64, dim: int = 16, block_size: int = 128) -> None:
        super().__init__()
        self.block_size = block_size
        self.embedding = nn.Embedding(vocab_size, dim)
        self.positions = nn.Embedding(block_size, dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.head = nn.Linear(dim, vocab_size)
        self.register_buffer("mask", torch.ones(block_size, block_size, dtype=torch.bool).tril(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        queries, keys, values = self.qkv(x).chunk(3, dim=-1)
        allowed = self.crop(x.shape[1])
        return self.head(x + nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=allowed))

    def crop(self, length: int) -> Tensor:
        return self.mask[-length:, :length]


class Sound(Faulty):
    def crop(self, length: int) -> Tensor:
        return self.mask[:length, :length]
