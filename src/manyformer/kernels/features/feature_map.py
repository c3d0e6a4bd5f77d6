"""Feature maps: a kernel k(q, k) as a product of features of the query and features of the key."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import TokenPositions
from manyformer.training_hooks import PostStepUpdate


class FeatureValues(NamedTuple):
    """The features exp(log) * y; a `log` of None is 0.

    What a token's features have in common may stand apart in `log`, so that the largest of them need not fit the range
    of a number: of a query it cancels, and those of keys are only compared.
    """

    y: Float[Tensor, "b h l r"]
    log: Float[Tensor, "b h l"] | None = None


class FeatureMap(nn.Module, ABC):
    """From queries or keys to features; the same map serves both. Raises ValueError for what it cannot map.

    `signed` says that features may be negative, so that sums of weights may vanish.
    """

    signed: bool = False
    max_length: int | None = None
    """The number of positions there are; None where any will do."""

    @abstractmethod
    def forward(self, x: Float[Tensor, "b h l e"], positions: TokenPositions) -> FeatureValues: ...


class RandomFeatures(FeatureMap, PostStepUpdate):
    """Features of random directions, `count` for each of `heads` heads, or the same ones for all where that is 1.

    With `redraw` they are drawn anew after every so many steps of training, from a seed of their own and the number of
    the draw: a run that is stopped and goes on draws the same ones. Directions and seed are saved with the weights.
    """

    matrix: Tensor
    seed: Tensor

    def __init__(self, key: int, count: int, *, heads: int, redraw: int | None) -> None:
        super().__init__()
        for name, value in (("key", key), ("features", count), ("heads", heads), ("redraw", redraw)):
            if value is not None and value < 1:
                raise ValueError(f"{type(self).__name__}: {name} ({value}) must be at least 1")
        self.redraw = redraw
        seed = torch.empty((), dtype=torch.long, device="cpu").random_(2**40)
        self.register_buffer("seed", seed.to(torch.empty(0).device))
        self.register_buffer("matrix", torch.empty(heads, count, key))
        if not self.matrix.is_meta:
            self.matrix.copy_(self._drawn(int(seed), 0))

    @abstractmethod
    def draw(self, count: int, key: int, generator: torch.Generator) -> Float[Tensor, "r e"]:
        """Random directions for one head, on the CPU."""

    def after_step(self, step: int) -> None:
        if self.redraw is not None and step % self.redraw == 0:
            self.matrix.copy_(self._drawn(int(self.seed), step // self.redraw))

    def _drawn(self, seed: int, number: int) -> Float[Tensor, "h r e"]:
        # the seeds of two draws must not be neighbours of each other's
        generator = torch.Generator().manual_seed((seed + number * 0x9E3779B97F4A7C15) % 2**63)
        heads, count, key = self.matrix.shape
        return torch.stack([self.draw(count, key, generator) for _ in range(heads)])

    def project(self, x: Float[Tensor, "b h l e"], scale: Tensor | float = 1.0) -> Float[Tensor, "b h l r"]:
        """The products of scaled x with every direction; groups of heads share one matrix."""
        matrix = (self.matrix * scale).to(x.dtype)
        heads = matrix.shape[0]
        if heads == 1:
            return x @ matrix[0].T
        return x @ matrix.repeat_interleave(x.shape[1] // heads, dim=0).mT

    def extra_repr(self) -> str:
        heads, count, key = self.matrix.shape
        return f"{count} of {key} channels, {heads} heads, redraw={self.redraw}"


def independent_directions(count: int, key: int, generator: torch.Generator) -> Float[Tensor, "r e"]:
    """Directions drawn independently from the standard normal distribution."""
    return torch.randn(count, key, generator=generator, device="cpu")


def orthogonal_directions(count: int, key: int, generator: torch.Generator) -> Float[Tensor, "r e"]:
    """Directions of standard normal lengths, orthogonal in blocks of `key` (Choromanski et al. 2021, section 2.4).

    Each by itself is standard normal, and estimates from orthogonal ones vary less.
    """
    blocks = -(-count // key)
    q, r = torch.linalg.qr(torch.randn(blocks, key, key, generator=generator, device="cpu"))
    # with the signs of r's diagonal, q is uniform over all rotations
    q = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]
    lengths = torch.randn(count, key, generator=generator, device="cpu").norm(dim=-1, keepdim=True)
    found: Tensor = q.mT.reshape(-1, key)[:count] * lengths
    return found
