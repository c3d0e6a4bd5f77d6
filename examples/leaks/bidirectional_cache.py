"""With a cache, the tokens of a chunk see each other in both directions.

The mask is made for calls without a cache and left out with one, which is right for single tokens and wrong for
chunks: a second turn of a conversation, speculative decoding, prompts in parts. `is_causal=True` is no mend, because
it aligns the triangle with the first key. Met in nanoGPT-like code to which a cache was added. Mend: row i of the chunk
sees all cached tokens and its own first i.
"""

import torch
from torch import Tensor, nn

FAILS = "prefill"

Cache = tuple[Tensor, Tensor]


class Faulty(nn.Module):
    def __init__(self, vocab_size: int = 64, dim: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        x = self.embedding(tokens)
        queries, keys, values = self.qkv(x).chunk(3, dim=-1)
        if cache is not None:
            keys = torch.cat([cache[0], keys], dim=1)
            values = torch.cat([cache[1], values], dim=1)
        mask = self.mask(queries.shape[1], keys.shape[1])
        read = nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        return self.head(x + read), (keys, values)

    def mask(self, new: int, all_tokens: int) -> Tensor | None:
        if new < all_tokens:
            return None
        return torch.ones(new, new, dtype=torch.bool).tril()


class Sound(Faulty):
    def mask(self, new: int, all_tokens: int) -> Tensor | None:
        return torch.ones(new, all_tokens, dtype=torch.bool).tril(all_tokens - new)
