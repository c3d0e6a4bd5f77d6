"""A model that takes targets for its loss mixes them into its logits.

Met as teacher forcing that stays on, as label embeddings, and as a memory that is written with the targets before it is
read. A test that calls `model(tokens)` never sees it; one that passes the tokens as targets neither. Mend: nothing but
the loss may depend on targets.
"""

from torch import Tensor, nn

FAILS = "targets"


class Faulty(nn.Module):
    def __init__(self, vocab_size: int = 64, dim: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.read(self.embedding(tokens).cumsum(1), targets)
        logits = self.head(x)
        if targets is None:
            return logits, None
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def read(self, x: Tensor, targets: Tensor | None) -> Tensor:
        if targets is None:
            return x
        return x + self.embedding(targets)


class Sound(Faulty):
    def read(self, x: Tensor, targets: Tensor | None) -> Tensor:
        return x
