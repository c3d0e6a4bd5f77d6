"""Inputs drawn for contracts and measurements: toy problems of a few symbols, and vectors that token ids stand for."""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Generator, Tensor, nn

from manyformer.nn.batches import Batch

SYMBOLS = 8
PERIOD = 4
ROWS = 32

FIRST_SYMBOL = 5
"""The smaller ids are special tokens: 1 starts a target, 4 is the mask."""


class Toy(NamedTuple):
    """A batch of a toy problem, and the loss of guessing in nats per target."""

    batch: Batch
    guessing_loss: float


class ToyDraw(NamedTuple):
    """The random draws of a toy problem.

    `period` are symbols (ROWS, PERIOD), drawn before anything else; a row that repeats them has `length` tokens.
    """

    generator: Generator
    device: torch.device
    length: int
    period: Int[Tensor, "rows period"]

    @classmethod
    def make(cls, generator: Generator, device: torch.device, length: int) -> "ToyDraw":
        """A draw with random symbols."""
        return cls(generator, device, length, _draw_symbols(generator, device, ROWS, PERIOD))

    def symbols(self, length: int) -> Int[Tensor, "rows l"]:
        """Further random symbols."""
        return _draw_symbols(self.generator, self.device, ROWS, length)

    def ordered_marks(self) -> tuple[Int[Tensor, "rows l"], Int[Tensor, " rows"]]:
        """Rows of eight tokens with one 5 and one 6, and whether the 5 comes first."""
        tokens = self.symbols(2 * PERIOD).clamp(min=FIRST_SYMBOL + 2)
        order = torch.rand(tokens.shape, generator=self.generator).argsort(dim=1)[:, :2].to(tokens.device)
        tokens.scatter_(1, order[:, :1], FIRST_SYMBOL).scatter_(1, order[:, 1:], FIRST_SYMBOL + 1)
        return tokens, (order[:, 0] < order[:, 1]).long()

    def repeated(self) -> Int[Tensor, "rows l"]:
        """Rows that repeat the symbols of `period`."""
        return self.period.repeat(1, self.length // PERIOD)


def _draw_symbols(generator: Generator, device: torch.device, rows: int, length: int) -> Tensor:
    return torch.randint(FIRST_SYMBOL, FIRST_SYMBOL + SYMBOLS, (rows, length), generator=generator).to(device)


STAND_IN_IDS = 32
"""The number of different vectors that stand for token ids."""


@lru_cache(maxsize=64)
def stand_in_vectors(draw: Callable[..., Tensor], size: int, device: torch.device) -> nn.Embedding:
    """A vector for each token id, drawn by `draw(ids, size)`, the same in every process.

    An embedding, so that contracts can differentiate by its output."""
    # of its own: it neither depends on the state of other generators nor changes it
    generator = torch.Generator().manual_seed(STAND_IN_IDS)
    with torch.inference_mode(False):  # noqa: FBT003 - torch.compile takes no keyword
        table = draw(STAND_IN_IDS, size, generator=generator, device="cpu")
        return nn.Embedding(STAND_IN_IDS, size, _weight=table.to(device)).requires_grad_(requires_grad=False)
