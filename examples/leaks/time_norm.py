"""Features are normalized over time.

Met where a layer of vision or speech (`GroupNorm`, `InstanceNorm1d`, batch norm over time, a standardized series) is
put into a language model: mean and variance of the whole sequence reach its first token. Mend: the features of each
token alone, or statistics of the tokens so far.
"""

from torch import Tensor, nn

FAILS = "causal"


class Faulty(nn.Module):
    def __init__(self, vocab_size: int = 64, dim: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.norm = nn.GroupNorm(2, dim)
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.normalize(self.embedding(tokens).cumsum(1)))

    def normalize(self, x: Tensor) -> Tensor:
        # GroupNorm takes the mean over all axes behind the channels, which are time here
        return self.norm(x.mT).mT


class Sound(Faulty):
    def normalize(self, x: Tensor) -> Tensor:
        # each token is a row of its own
        return self.norm(x.flatten(0, 1)).view_as(x)
