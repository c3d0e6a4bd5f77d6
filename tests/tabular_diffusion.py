"""A masked diffusion whose every prediction stands in a table, so that all of its probabilities can be enumerated."""

from itertools import combinations, permutations
from math import comb

import torch
from torch import Tensor, nn

from manyformer.models import ClassHead, DiffusionLM, TokenEmbedding
from manyformer.models.model import ModelOutput
from manyformer.models.noise import MDLM_SCHEDULE, NoiseSchedule
from manyformer.nn.core import Chain, LayerOutput, Pointwise, TokenPositions

MASK = 0


class TabularDiffusion(DiffusionLM):
    """Random logits for each place of each row of `length` tokens from 0, which hides, to `vocab` - 1."""

    def __init__(self, vocab: int, length: int, schedule: NoiseSchedule = MDLM_SCHEDULE, seed: int = 0) -> None:
        body = Chain(nothing=Pointwise(nn.Identity()))
        super().__init__(TokenEmbedding(vocab, vocab), body, ClassHead(vocab, vocab), schedule, mask_token=MASK)
        nn.init.eye_(self.head.weight)
        generator = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(2 * torch.randn(vocab**length, length, vocab, generator=generator))

    def forward(self, tokens: Tensor, segments: Tensor | None = None) -> ModelOutput:
        return ModelOutput(self.stream(tokens) @ self.head.weight.mT)

    def stream(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        powers = self.embed.vocab ** torch.arange(length)
        return self.table[(tokens * powers).sum(1)][:, :length]

    @property
    def unit_size(self) -> int | None:
        return None

    def encode_noised(self, noised: Tensor, clean: Tensor, positions: TokenPositions) -> LayerOutput:
        return LayerOutput(self.stream(noised))

    def nats(self, text: tuple[int, ...], hidden: tuple[int, ...]) -> dict[int, float]:
        """-log p of each hidden token of a text, given all others."""
        noised = torch.tensor([[MASK if place in hidden else token for place, token in enumerate(text)]])
        logits = self(noised).logits[0].detach().double()
        logits[:, MASK] = -torch.inf
        log_probabilities = logits.log_softmax(-1)
        return {place: -float(log_probabilities[place, text[place]]) for place in hidden}


def nats_of_orders(model: TabularDiffusion, text: tuple[int, ...]) -> list[float]:
    """The negative log-likelihood of a text in each order of its tokens, one after the other."""
    totals = []
    for order in permutations(range(len(text))):
        totals.append(sum(model.nats(text, order[n:])[place] for n, place in enumerate(order)))
    return totals


def nats_of_counts(model: TabularDiffusion, text: tuple[int, ...]) -> float:
    """The mean over k, and over the sets of k hidden tokens, of their nats times l / k."""
    length = len(text)
    total = 0.0
    for k in range(1, length + 1):
        for hidden in combinations(range(length), k):
            total += sum(model.nats(text, hidden).values()) * length / k / comb(length, k) / length
    return total
