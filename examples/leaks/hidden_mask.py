"""The output projection is zero at first, and hides that there is no mask at all.

Met in models that follow nanochat, modded-nanogpt and parameter-golf, whose projections begin at zero: at first
nothing flows through attention, so that a test of the new model passes and the leak comes with training. `check`
perturbs parameters that are zero, and says so. Mend: `is_causal=True`.
"""

from torch import Tensor, nn

FAILS = "causal"


class Faulty(nn.Module):
    is_causal = False

    def __init__(self, vocab_size: int = 64, dim: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.projection = nn.Linear(dim, dim, bias=False)
        nn.init.zeros_(self.projection.weight)
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        queries, keys, values = self.qkv(x).chunk(3, dim=-1)
        read = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=self.is_causal)
        return self.head(x + self.projection(read))


class Sound(Faulty):
    is_causal = True
