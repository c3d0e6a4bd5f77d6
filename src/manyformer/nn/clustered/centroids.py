"""Online spherical k-means: centroids of keys updated by moving averages (Roy et al. 2021, section 4.1)."""

from typing import NamedTuple, final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.nn.runtime.device_reads import places_of
from manyformer.nn.runtime.head_selection import PerHeadTensors
from manyformer.nn.runtime.recompute import choose_once
from manyformer.nn.runtime.torch_internals import compiler_disabled, tensor_version
from manyformer.nn.runtime.training_hooks import PostStepUpdate

LLOYD_ITERATIONS = 10
"""Iterations of Lloyd's algorithm on the first batch."""


class CentroidSums(NamedTuple):
    """The sum of the keys nearest to each centroid, and the total number of keys."""

    sums: Float[Tensor, "h k e"]
    total: Float[Tensor, ""]


class ReadFlag(NamedTuple):
    """A flag on a device as the host has read it, in one version of its buffer."""

    buffer: Tensor
    version: int | None
    is_set: bool


@final
class KMeansCentroids(PerHeadTensors, PostStepUpdate):
    """`clusters` unit vectors for each head; a key belongs to the centroid with the largest cosine.

    Centroids are initialized to random directions. After the first training step they move to the keys of its first
    batch (Lloyd's algorithm), not before that batch is read: its tokens would be routed by later ones. After every
    further step, each becomes the exponential moving average, with rate `decay`, of the keys nearest to it, over all
    processes of a run. They get no gradient: `commitment` times the mean squared distance of a
    key from its centroid, both of length 1, is a loss that moves the keys instead. In evaluation they do not change.
    They are saved with the weights. Raises ValueError for rates out of range.
    """

    head_axes = (("mean", -3), ("sums", -3))
    mean: Tensor
    sums: Tensor
    started: Tensor
    seed: Tensor

    def __init__(
        self, heads: int, clusters: int, key_dim: int, *, decay: float = 0.999, commitment: float = 1e-4
    ) -> None:
        super().__init__()
        for name, value in (("heads", heads), ("clusters", clusters), ("key_dim", key_dim)):
            if value < 1:
                raise ValueError(f"KMeansCentroids: {name} ({value}) must be at least 1")
        if not 0 <= decay < 1 or commitment < 0:
            raise ValueError(
                f"KMeansCentroids: decay ({decay}) must be in [0, 1), commitment ({commitment}) at least 0"
            )
        self.decay = decay
        self.commitment = commitment
        mean = F.normalize(torch.randn(heads, clusters, key_dim), dim=-1)
        self.register_buffer("mean", mean)
        # the moving averages before normalization; zero until the first batch
        self.register_buffer("sums", mean * 0.0)
        self.register_buffer("started", torch.zeros((), dtype=torch.bool))
        self.register_buffer("seed", torch.empty((), dtype=torch.long, device="cpu").random_(2**40).to(mean.device))
        self._pending: CentroidSums | None = None
        self._first_keys: Tensor | None = None
        self._read_started: ReadFlag | None = None

    def forward(
        self, x: Float[Tensor, "b h s e"], valid: Bool[Tensor, "b s"] | None, count: int | None = None
    ) -> Float[Tensor, "b h s k"]:
        """Cosines of keys of length 1 with all centroids; in training the keys also count towards the next update.

        `count` is the number of `valid` keys where it is known without a look at them."""
        if self.training:
            choose_once(lambda: self._accumulate(x.detach(), valid, count))
        return x @ self.mean.to(x.dtype).mT

    def loss(self, cosines: Float[Tensor, "b h s k"], valid: Bool[Tensor, "b s"] | None) -> Tensor | float:
        """The commitment loss, a mean over tokens and heads; 0 in evaluation."""
        if not self.training or not self.commitment:
            return 0.0
        # |a - b|^2 of vectors of length 1
        squared_distances = 2 - 2 * cosines.amax(-1)
        if valid is None:
            return self.commitment * squared_distances.mean()
        count = valid.sum().clamp(min=1) * squared_distances.shape[1]
        return self.commitment * (squared_distances * valid[:, None]).sum() / count

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Update each centroid with the keys that were nearest to it since the last step."""
        if self._first_keys is not None:
            self._init_from_keys(self._first_keys)
            self._first_keys = None
        if self._pending is None:
            return
        sums, count = (_sum_over_processes(part) for part in self._pending)
        self._pending = None
        means = (sums / count.clamp(min=1)).to(self.sums.dtype)
        # sums divided by all keys, not by those of a cluster: a cluster with few keys moves slowly
        self.sums.mul_(self.decay).add_(means, alpha=1 - self.decay)
        self.mean.copy_(_normalize_sums(self.sums, self.mean))

    def extra_repr(self) -> str:
        heads, clusters, key_dim = self.mean.shape
        return f"{clusters} of {key_dim} channels, {heads} heads, decay={self.decay}, commitment={self.commitment}"

    @compiler_disabled
    @torch.no_grad()
    def _accumulate(self, x: Tensor, valid: Bool[Tensor, "b s"] | None, count: int | None) -> None:
        keys = x.transpose(0, 1).flatten(1, 2)
        if valid is not None:
            keys = keys.index_select(1, places_of(valid.flatten(), count))
        if not self._is_started():
            # clusters of these keys for these keys would let a token be routed by later ones
            if self._first_keys is None:
                self._first_keys = keys
            return
        new_sums = centroid_sums(keys, nearest_centroid(keys, self.mean.to(keys.dtype)), self.mean.shape[1])
        pending = self._pending
        if pending is None:
            self._pending = new_sums
        else:
            self._pending = CentroidSums(pending.sums + new_sums.sums, pending.total + new_sums.total)

    def _is_started(self) -> bool:
        """`started`, read again only where it was written, loaded or moved: a device would make each step wait."""
        flag = self._read_started
        version = tensor_version(self.started)
        if flag is None or version is None or flag.buffer is not self.started or flag.version != version:
            self._read_started = flag = ReadFlag(self.started, version, is_set=bool(self.started))
        return flag.is_set

    def _init_from_keys(self, keys: Float[Tensor, "h n e"]) -> None:
        """Run Lloyd's algorithm on the keys of all processes, starting from random keys of process 0."""
        # a generator of its own: training draws the same numbers whether or not there are clusters
        generator = torch.Generator().manual_seed(int(self.seed))
        if keys.shape[1]:
            draws = torch.randint(keys.shape[1], self.mean.shape[:2], generator=generator, device="cpu")
            # without repetition where there are keys enough: equal centroids would stay equal
            if keys.shape[1] >= self.mean.shape[1]:
                draws = torch.stack([torch.randperm(keys.shape[1], generator=generator, device="cpu") for _ in draws])
            self.mean.copy_(keys.gather(1, _expand_index(draws[:, : self.mean.shape[1]].to(keys.device), keys)))
        if _is_distributed():
            # processes have different keys, and must begin with the same centroids
            dist.broadcast(self.mean, 0)
        for _ in range(LLOYD_ITERATIONS):
            new_sums = centroid_sums(keys, nearest_centroid(keys, self.mean.to(keys.dtype)), self.mean.shape[1])
            sums, count = (_sum_over_processes(part) for part in new_sums)
            self.sums.copy_(sums / count.clamp(min=1))
            self.mean.copy_(_normalize_sums(self.sums, self.mean))
        self.started.fill_(1)


def nearest_centroid(x: Float[Tensor, "h n e"], centroids: Float[Tensor, "h k e"]) -> Int[Tensor, "h n"]:
    """The index of the centroid with the smallest angle."""
    return (x @ centroids.mT).argmax(-1)


def centroid_sums(x: Float[Tensor, "h n e"], labels: Int[Tensor, "h n"], clusters: int) -> CentroidSums:
    """The sum of the keys with each label."""
    sums = x.new_zeros(x.shape[0], clusters, x.shape[2]).scatter_add(1, _expand_index(labels, x), x)
    return CentroidSums(sums, x.new_full((), float(x.shape[1])))


def _normalize_sums(sums: Tensor, fallback: Tensor) -> Tensor:
    """Normalize sums to length 1; use `fallback` where a sum is zero."""
    length = sums.norm(dim=-1, keepdim=True)
    return torch.where(length > 0, sums / length.clamp(min=1e-30), fallback)


def _expand_index(index: Int[Tensor, "h n"], x: Float[Tensor, "h s e"]) -> Int[Tensor, "h n e"]:
    return index[..., None].expand(*index.shape, x.shape[-1])


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _sum_over_processes(values: Tensor) -> Tensor:
    """The sum over all processes of a run."""
    if _is_distributed():
        dist.all_reduce(values)
    return values
