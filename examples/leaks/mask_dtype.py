"""A mask of ones and zeros in floating point: `scaled_dot_product_attention` adds it to the scores.

A boolean mask allows what is True; a floating mask is added, and 0 and 1 are next to nothing, so that every token sees
every other. No error says so. Met where masks are made by `torch.tril(torch.ones(...))` or cast with the model's
weights to bfloat16. Mend: `dtype=torch.bool`, or minus infinity.
"""

import torch
from torch import Tensor, nn

FAILS = "causal"


class Faulty(nn.Module):
    mask_dtype = torch.float32

    def __init__(self, vocab_size: int = 64, dim: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        queries, keys, values = self.qkv(x).chunk(3, dim=-1)
        mask = torch.tril(torch.ones(x.shape[1], x.shape[1])).to(self.mask_dtype)
        if mask.is_floating_point():
            mask = mask.to(queries)
        return self.head(x + nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask))


class Sound(Faulty):
    mask_dtype = torch.bool
