"""Honest though it looks wrong: masked models and text diffusion see both sides by design.

What they predict is hidden in the input, so that no token sees itself. `Model` alone fails `causal`; with
`causal=False` the other contracts are checked: rows of a batch, equal calls, precision. Its likelihood is a bound, or
that of one token at a time given all others, and not to be compared with nats per token of a model that reads forward.
"""

from torch import Tensor, nn

from manyformer.analysis.contracts import Adapter

LOOKS_LIKE = "causal"
VOCAB = 64


class Model(nn.Module):
    def __init__(self, vocab_size: int = VOCAB, dim: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        queries, keys, values = self.qkv(x).chunk(3, dim=-1)
        return self.head(x + nn.functional.scaled_dot_product_attention(queries, keys, values))


def honest() -> Adapter:
    model = Model()
    return Adapter(logits=model, vocab=VOCAB, causal=False)
