"""Random numbers in evaluation: `dropout_p` of `scaled_dot_product_attention` does not know the mode of the model.

The function drops in evaluation as well as in training. Scores then differ from call to call, and a seed that is set
before each call hides it. Met there, in `nn.functional.dropout` whose `training` is True by default, and in patterns of
sparse attention that are drawn anew (zoology's `BigBIRDAttention`). Mend: `dropout_p=p if self.training else 0.0`.
"""

from torch import Tensor, nn

FAILS = "seed"


class Faulty(nn.Module):
    def __init__(self, vocab_size: int = 64, dim: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        queries, keys, values = self.qkv(x).chunk(3, dim=-1)
        dropout_p = self.dropout_p()
        read = nn.functional.scaled_dot_product_attention(queries, keys, values, dropout_p=dropout_p, is_causal=True)
        return self.head(x + read)

    def dropout_p(self) -> float:
        return 0.1


class Sound(Faulty):
    def dropout_p(self) -> float:
        return 0.1 if self.training else 0.0
