"""Chunks are mixed causally, but each reads its own summary too.

Met in linear attention and state-space models in chunks: the mask between chunks has its diagonal, which lets a token
read the end of its own chunk. Sequences of one chunk show it as well as long ones. Mend: earlier chunks alone, and a
mask of tokens within the chunk.
"""

import torch
from torch import Tensor, nn

FAILS = "causal"
CHUNK = 8


class Faulty(nn.Module):
    diagonal = 0
    """The last chunk that a chunk reads, counted from its own."""

    def __init__(self, vocab_size: int = 64, dim: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.keys = nn.Linear(dim, dim)
        self.queries = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        padded = nn.functional.pad(x, (0, 0, 0, -x.shape[1] % CHUNK)).unflatten(1, (-1, CHUNK))
        queries = self.queries(padded).relu()
        keys = self.keys(padded).relu()
        # what a chunk leaves behind: the sum of keys times values
        states = torch.einsum("bnck,bncv->bnkv", keys, padded)
        chunks = x.new_ones(states.shape[1], states.shape[1]).tril(self.diagonal)
        read = torch.einsum("nm,bmkv->bnkv", chunks, states)
        between = torch.einsum("bnck,bnkv->bncv", queries, read)
        scores = torch.einsum("bnck,bndk->bncd", queries, keys).tril()
        within = torch.einsum("bncd,bndv->bncv", scores, padded)
        return self.head(x + 0.01 * (between + within).flatten(1, 2)[:, : x.shape[1]])


class Sound(Faulty):
    diagonal = -1
