"""Honest though it looks wrong: a prefix model reads its prompt in both directions.

All tokens of the prompt are given, and none of them is predicted; each token behind it sees what came before. `Model`
alone fails `causal`, because nobody has told where the prompt ends. `honest` says it: an adapter that puts a fixed
prompt first and gives the logits of what follows.
"""

import torch
from torch import Tensor, nn

from manyformer.analysis.contracts import Adapter

LOOKS_LIKE = "causal"
VOCAB = 64
PROMPT = 8


class Model(nn.Module):
    def __init__(self, vocab_size: int = VOCAB, dim: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        queries, keys, values = self.qkv(x).chunk(3, dim=-1)
        allowed = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        allowed[:, :PROMPT] = True
        return self.head(x + nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=allowed))


def honest() -> Adapter:
    model = Model()
    prompt = torch.arange(PROMPT)

    def logits(tokens: Tensor) -> Tensor:
        whole = torch.cat([prompt.expand(tokens.shape[0], -1), tokens], dim=1)
        return model(whole)[:, PROMPT:]

    return Adapter(logits=logits, vocab=VOCAB, module=model)
