"""Statistics of the batch, in training, reach every token of every row.

Met in language models with `BatchNorm1d`, and in normalized hidden states of a batch: evaluation is right, training
sees later tokens and other rows. Mend: a norm of each token (`LayerNorm`, `RMSNorm`).
"""

from torch import Tensor, nn

FAILS = "batch-training"


class Faulty(nn.Module):
    def __init__(self, vocab_size: int = 64, dim: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.norm = self.make_norm(dim)
        self.head = nn.Linear(dim, vocab_size)

    def make_norm(self, dim: int) -> nn.Module:
        return nn.BatchNorm1d(dim)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).cumsum(1)
        return self.head(self.norm(x.flatten(0, 1)).view_as(x))


class Sound(Faulty):
    def make_norm(self, dim: int) -> nn.Module:
        return nn.RMSNorm(dim)
