"""Experts have seats for a share of the whole batch: a row loses its seat to another row.

Met in mixtures of experts with a capacity factor (Switch, GShard) that keep dropping in evaluation: a text scores
differently beside other texts, and with another size of batch. Where seats go to the highest scores first, a later
token takes those of earlier ones, too. Mend: no capacity in evaluation, and to know that training has one.
"""

import torch
from torch import Tensor, nn

FAILS = "batch"


class Faulty(nn.Module):
    capacity_factor: float | None = 1.0

    def __init__(self, vocab_size: int = 64, dim: int = 16, experts: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.router = nn.Linear(dim, experts)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(experts))
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        # all rows of the batch in one list of tokens
        flat = x.flatten(0, 1)
        gate, choice = self.router(flat).softmax(-1).max(-1)
        mixed = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            seated = (choice == index).nonzero().flatten()
            if self.capacity_factor is not None:
                seats = int(self.capacity_factor * len(flat) / len(self.experts))
                seated = seated[:seats]
            computed = gate[seated, None] * expert(flat[seated])
            mixed = mixed.index_add(0, seated, computed.to(mixed))
        return self.head(x + mixed.view_as(x))


class Sound(Faulty):
    capacity_factor = None
