"""Centroids of keys that follow them by moving averages: online spherical k-means (Roy et al. 2021, section 4.1)."""

from typing import NamedTuple, final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from manyformer.recompute import choose_once
from manyformer.training_hooks import PostStepUpdate

ROUNDS = 10
"""How often Lloyd's algorithm is gone through to begin with."""


class CentroidSums(NamedTuple):
    """Of the keys nearest to each centroid the sum, and how many keys there were at all."""

    sums: Float[Tensor, "h k e"]
    total: Float[Tensor, ""]


@final
class KMeansCentroids(nn.Module, PostStepUpdate):
    """`clusters` directions for each head, to which keys are near by their angle.

    They begin as random directions, good enough for any use. The first batch of training moves them to where its keys
    are (Lloyd's algorithm); then, after every step, each goes to the average of the keys nearest to it, older ones
    counting `decay` times less with each step, over all processes of a run. No gradient moves them: `commitment` times
    the mean squared distance of a key from its centroid, both of length 1, is a loss that draws the keys there instead.
    In evaluation they stay. They are saved with the weights. Raises ValueError for rates that are none.
    """

    mean: Tensor
    sums: Tensor
    started: Tensor
    seed: Tensor

    def __init__(self, heads: int, clusters: int, key: int, *, decay: float = 0.999, commitment: float = 1e-4) -> None:
        super().__init__()
        for name, value in (("heads", heads), ("clusters", clusters), ("key", key)):
            if value < 1:
                raise ValueError(f"KMeansCentroids: {name} ({value}) must be at least 1")
        if not 0 <= decay < 1 or commitment < 0:
            raise ValueError(
                f"KMeansCentroids: decay ({decay}) must be in [0, 1), commitment ({commitment}) at least 0"
            )
        self.decay, self.commitment = decay, commitment
        mean = F.normalize(torch.randn(heads, clusters, key), dim=-1)
        self.register_buffer("mean", mean)
        # what the averages are made of; far less than any key until there are some
        self.register_buffer("sums", mean * 0.0)
        self.register_buffer("started", torch.zeros((), dtype=torch.bool))
        self.register_buffer("seed", torch.empty((), dtype=torch.long, device="cpu").random_(2**40).to(mean.device))
        self._pending: CentroidSums | None = None

    def forward(self, x: Float[Tensor, "b h s e"], real: Bool[Tensor, "b s"] | None) -> Float[Tensor, "b h s k"]:
        """The cosines of keys, whose length is 1, with all centroids; in training they are also learnt from."""
        if self.training:
            choose_once(lambda: self._learn(x.detach(), real))
        return x @ self.mean.to(x.dtype).mT

    def loss(self, near: Float[Tensor, "b h s k"], real: Bool[Tensor, "b s"] | None) -> Tensor | float:
        """The commitment of keys to their centroids, a mean over tokens and heads; nothing in evaluation."""
        if not self.training or not self.commitment:
            return 0.0
        apart = 2 - 2 * near.amax(-1)
        if real is None:
            return self.commitment * apart.mean()
        count = real.sum().clamp(min=1) * apart.shape[1]
        return self.commitment * (apart * real[:, None]).sum() / count

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Let each centroid follow the keys that were nearest to it since the last step."""
        if self._pending is None:
            return
        near, count = (_over_processes(part) for part in self._pending)
        self._pending = None
        new = (near / count.clamp(min=1)).to(self.sums.dtype)
        self.sums.mul_(self.decay).add_(new, alpha=1 - self.decay)
        self.mean.copy_(_directions(self.sums, self.mean))

    def extra_repr(self) -> str:
        heads, clusters, key = self.mean.shape
        return f"{clusters} of {key} channels, {heads} heads, decay={self.decay}, commitment={self.commitment}"

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def _learn(self, x: Tensor, real: Bool[Tensor, "b s"] | None) -> None:
        keys = x.transpose(0, 1).flatten(1, 2)
        counted = None if real is None else real.flatten()
        keys = keys if counted is None else keys[:, counted]
        if not self.started:
            self._start(keys)
        found = centroid_sums(keys, nearest_centroid(keys, self.mean.to(keys.dtype)), self.mean.shape[1])
        before = self._pending
        self._pending = found if before is None else CentroidSums(before.sums + found.sums, before.total + found.total)

    def _start(self, keys: Float[Tensor, "h n e"]) -> None:
        """Lloyd's algorithm on the keys of all processes, from some of the first one's."""
        generator = torch.Generator().manual_seed(int(self.seed))
        if keys.shape[1]:
            draws = torch.randint(keys.shape[1], self.mean.shape[:2], generator=generator, device="cpu")
            if keys.shape[1] >= self.mean.shape[1]:
                draws = torch.stack([torch.randperm(keys.shape[1], generator=generator, device="cpu") for _ in draws])
            self.mean.copy_(keys.gather(1, _wide(draws[:, : self.mean.shape[1]].to(keys.device), keys)))
        if _together():
            dist.broadcast(self.mean, 0)
        for _ in range(ROUNDS):
            found = centroid_sums(keys, nearest_centroid(keys, self.mean.to(keys.dtype)), self.mean.shape[1])
            near, count = (_over_processes(part) for part in found)
            self.sums.copy_(near / count.clamp(min=1))
            self.mean.copy_(_directions(self.sums, self.mean))
        self.started.fill_(1)


def nearest_centroid(x: Float[Tensor, "h n e"], mean: Float[Tensor, "h k e"]) -> Int[Tensor, "h n"]:
    """The number of the centroid with the smallest angle."""
    return (x @ mean.mT).argmax(-1)


def centroid_sums(x: Float[Tensor, "h n e"], label: Int[Tensor, "h n"], clusters: int) -> CentroidSums:
    """The sum of the keys with each label."""
    near = x.new_zeros(x.shape[0], clusters, x.shape[2]).scatter_add(1, _wide(label, x), x)
    return CentroidSums(near, x.new_tensor(float(x.shape[1])))


def _directions(sums: Tensor, before: Tensor) -> Tensor:
    """The sums at length 1; where there is none, what was before."""
    length = sums.norm(dim=-1, keepdim=True)
    return torch.where(length > 0, sums / length.clamp(min=1e-30), before)


def _wide(index: Int[Tensor, "h n"], x: Float[Tensor, "h s e"]) -> Int[Tensor, "h n e"]:
    return index[..., None].expand(*index.shape, x.shape[-1])


def _together() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _over_processes(values: Tensor) -> Tensor:
    """The sum over all processes of a run."""
    if _together():
        dist.all_reduce(values)
    return values
