"""The cache keeps keys that are rotated by their positions, and each step rotates them again.

The step after the prompt is right, as the prompt's keys went in before rotation; later steps are not. Losses do not
show it, because no cache is used in training. Met in local-attention 1.11.2, whose `generate` decodes so. Mend: keep
keys before rotation and rotate all, or rotate each once.
"""

import torch
from torch import Tensor, nn

FAILS = "cached"

Cache = tuple[Tensor, Tensor]


def rotate(x: Tensor) -> Tensor:
    """Rotate the halves of the features by the positions of the tokens, which begin at 0."""
    half = x.shape[-1] // 2
    frequencies = 100.0 ** (-torch.arange(half) / half)
    angles = torch.arange(x.shape[1])[:, None] * frequencies
    first, second = x.chunk(2, dim=-1)
    cos = angles.cos().to(x)
    sin = angles.sin().to(x)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Faulty(nn.Module):
    def __init__(self, vocab_size: int = 64, dim: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        x = self.embedding(tokens)
        queries, keys, values = self.qkv(x).chunk(3, dim=-1)
        is_step = cache is not None
        if is_step:
            keys = torch.cat([cache[0], keys], dim=1)
            values = torch.cat([cache[1], values], dim=1)
        rotated = rotate(keys)
        # padded in front, so that the queries get the positions of the last keys
        padded = nn.functional.pad(queries, (0, 0, keys.shape[1] - queries.shape[1], 0))
        queries = rotate(padded)[:, -queries.shape[1] :]
        mask = torch.ones(queries.shape[1], keys.shape[1], dtype=torch.bool).tril(keys.shape[1] - queries.shape[1])
        read = nn.functional.scaled_dot_product_attention(queries, rotated, values, attn_mask=mask)
        return self.head(x + read), (self.kept(keys, rotated, is_step=is_step), values)

    def kept(self, keys: Tensor, rotated: Tensor, *, is_step: bool) -> Tensor:
        return rotated if is_step else keys


class Sound(Faulty):
    def kept(self, keys: Tensor, rotated: Tensor, *, is_step: bool) -> Tensor:
        return keys
