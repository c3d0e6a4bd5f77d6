"""Layers that are sound in evaluation, and in training mode have one mistake each."""

import torch
from mutants import Random, Simple
from torch import Tensor, nn

from manyformer.nn.core import Context


class MixedInTraining(Simple):
    """A mean over the row, in training mode alone."""

    def change(self, x: Tensor, ctx: Context) -> Tensor:
        return x + 0.1 * x.mean(1, keepdim=True) if self.training else x


class NormalizedByBatch(Simple):
    """Batch normalization over all tokens, whose statistics are fixed in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def change(self, x: Tensor, ctx: Context) -> Tensor:
        normalized: Tensor = self.norm(x.mT).mT
        return normalized


class WhitenedInTraining(Simple):
    """Subtracts the mean over the batch, in training mode alone."""

    def change(self, x: Tensor, ctx: Context) -> Tensor:
        return x - 0.1 * x.mean(0, keepdim=True) if self.training else x


class RandomInTraining(Random):
    """The same noise, in training mode alone."""

    def change(self, x: Tensor, ctx: Context) -> Tensor:
        return super().change(x, ctx) if self.training else x


class Counting(Simple):
    """Sound: scales by the number of calls in training mode so far, which it keeps in a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def change(self, x: Tensor, ctx: Context) -> Tensor:
        if self.training:
            self.calls += 1
        return x * (1 + self.calls)
