"""A block is summed as a whole, and each of its tokens gets the sum.

Met in models with local blocks, and in architectures that a search had written: the loss falls far below that of any
honest model, because most targets of a block are in the sum. Mend: sum up to each token.
"""

from torch import Tensor, nn

FAILS = "causal"
BLOCK = 8


class Faulty(nn.Module):
    def __init__(self, vocab_size: int = 64, dim: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        padding = -x.shape[1] % BLOCK
        blocks = nn.functional.pad(x, (0, 0, 0, padding)).unflatten(1, (-1, BLOCK))
        mixed = self.mix(blocks).flatten(1, 2)[:, : x.shape[1]]
        return self.head(x + mixed)

    def mix(self, blocks: Tensor) -> Tensor:
        """Blocks (b, n, BLOCK, dim) to a summary for each token."""
        return blocks.sum(2, keepdim=True).expand_as(blocks)


class Sound(Faulty):
    def mix(self, blocks: Tensor) -> Tensor:
        return blocks.cumsum(2)
