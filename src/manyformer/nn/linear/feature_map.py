"""Feature maps: a kernel k(q, k) as the dot product of features of the query and features of the key."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.nn.core import TokenPositions
from manyformer.nn.runtime.handwritten_gradient import hides_values
from manyformer.nn.runtime.head_selection import PerHeadTensors
from manyformer.nn.runtime.training_hooks import PostStepUpdate


class FeatureValues(NamedTuple):
    """The features exp(log_scale) * y; a `log_scale` of None is 0.

    A common factor of the features of a token may be returned in `log_scale`, so that it cannot overflow: that of a
    query cancels, and those of keys are used only relative to each other.
    """

    y: Float[Tensor, "b h l r"]
    log_scale: Float[Tensor, "b h l"] | None = None


class FeatureMap(nn.Module, ABC):
    """Maps queries or keys to features. Raises ValueError for inputs it cannot map.

    `signed` says that features may be negative, so that sums of weights may be zero.
    """

    signed: bool = False
    max_length: int | None = None
    """The number of positions that the map supports; None means any."""

    @abstractmethod
    def forward(self, x: Float[Tensor, "b h l e"], positions: TokenPositions) -> FeatureValues: ...


class RandomFeatures(FeatureMap, PerHeadTensors, PostStepUpdate):
    """Features from random directions: `count` for each of `heads` heads, shared by all heads if `heads` is 1.

    With `redraw` the directions are redrawn every `redraw` training steps, from the module's seed and the number of
    the draw, so that a resumed run draws the same ones. Directions and seed are saved with the weights.
    """

    head_axes: tuple[tuple[str, int], ...] = (("matrix", -3),)
    matrix: Tensor
    seed: Tensor

    def __init__(self, key_dim: int, count: int, *, heads: int, redraw: int | None) -> None:
        super().__init__()
        for name, value in (("key_dim", key_dim), ("features", count), ("heads", heads), ("redraw", redraw)):
            if value is not None and value < 1:
                raise ValueError(f"{type(self).__name__}: {name} ({value}) must be at least 1")
        self.redraw = redraw
        seed = torch.empty((), dtype=torch.long, device="cpu").random_(2**40)
        self.register_buffer("seed", seed.to(torch.empty(0).device))
        self.register_buffer("matrix", torch.empty(heads, count, key_dim))
        if not self.matrix.is_meta and not hides_values():
            self.matrix.copy_(self._draw_matrix(int(seed), 0))

    @abstractmethod
    def draw(self, count: int, key_dim: int, generator: torch.Generator) -> Float[Tensor, "r e"]:
        """Draw random directions for one head, on the CPU."""

    def after_step(self, step: int) -> None:
        if self.redraw is not None and step % self.redraw == 0:
            self.matrix.copy_(self._draw_matrix(int(self.seed), step // self.redraw))

    def _draw_matrix(self, seed: int, draw_number: int) -> Float[Tensor, "h r e"]:
        # the seeds of successive draws must not be close to each other
        generator = torch.Generator().manual_seed((seed + draw_number * 0x9E3779B97F4A7C15) % 2**63)
        heads, count, key_dim = self.matrix.shape
        return torch.stack([self.draw(count, key_dim, generator) for _ in range(heads)])

    def project(self, x: Float[Tensor, "b h l e"], scale: Tensor | float = 1.0) -> Float[Tensor, "b h l r"]:
        """The products of x with every direction times `scale`; groups of heads share one matrix."""
        return project_heads(x, self.matrix * scale)

    def extra_repr(self) -> str:
        heads, count, key_dim = self.matrix.shape
        return f"{count} of {key_dim} channels, {heads} heads, redraw={self.redraw}"


def project_heads(x: Float[Tensor, "b h l e"], matrix: Float[Tensor, "g r e"]) -> Float[Tensor, "b h l r"]:
    """The products of x with the rows of the matrix of each head; groups of heads, or all, share one."""
    matrix, heads = matrix.to(x.dtype), len(matrix)
    if heads == 1:
        return x @ matrix[0].T
    return x @ matrix.repeat_interleave(x.shape[1] // heads, dim=0).mT


def independent_directions(count: int, key_dim: int, generator: torch.Generator) -> Float[Tensor, "r e"]:
    """Directions drawn independently from the standard normal distribution."""
    return torch.randn(count, key_dim, generator=generator, device="cpu")


def orthogonal_directions(count: int, key_dim: int, generator: torch.Generator) -> Float[Tensor, "r e"]:
    """Directions of standard normal lengths, orthogonal in blocks of `key_dim` (Choromanski et al. 2021, section 2.4).

    The marginal distribution of each is standard normal; estimates from orthogonal directions have less variance.
    """
    units = _orthogonal_units(count, key_dim, generator)
    lengths = torch.randn(count, key_dim, generator=generator, device="cpu").norm(dim=-1, keepdim=True)
    directions: Tensor = units * lengths
    return directions


def regularized_directions(count: int, key_dim: int, generator: torch.Generator) -> Float[Tensor, "r e"]:
    """Directions of the length sqrt(`key_dim`), orthogonal in blocks (Choromanski et al. 2021, theorem 1: SMREG).

    Their positive features estimate the regularized softmax kernel, a lower bound that approaches softmax's as
    `key_dim` grows."""
    directions: Tensor = _orthogonal_units(count, key_dim, generator) * float(key_dim) ** 0.5
    return directions


def _orthogonal_units(count: int, key_dim: int, generator: torch.Generator) -> Float[Tensor, "r e"]:
    """Vectors of length 1, uniform over all directions, orthogonal in blocks of `key_dim`."""
    blocks = -(-count // key_dim)
    # torch has no decomposition of half precision
    dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
    q, r = torch.linalg.qr(torch.randn(blocks, key_dim, key_dim, generator=generator, device="cpu", dtype=dtype))
    # with the signs of r's diagonal, q is uniform over all rotations
    q = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]
    units: Tensor = q.mT.reshape(-1, key_dim)[:count]
    return units
