"""Attention residuals: every branch reads a softmax over the outputs of all branches or blocks of layers before it."""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.nn.runtime.torch_internals import autocast_disabled
from manyformer.nn.streams.stream_stack import BranchPlace, StreamRule

NORM_EPS = 1e-6
"""The epsilon of the norm of sources."""


class DepthSource(NamedTuple):
    """What branches above may read: the embedding, an output or a sum of them, and 1 / sqrt(mean of squares) of it."""

    value: Float[Tensor, "b l d"]
    inverse_rms: Float[Tensor, "b l"]

    @classmethod
    def of(cls, value: Float[Tensor, "b l d"]) -> "DepthSource":
        """The source with this value; its norm is computed once for all branches that read it."""
        wide = value.to(torch.promote_types(value.dtype, torch.float32))
        return cls(value, (wide.square().mean(-1) + NORM_EPS).rsqrt())


class DepthSources(NamedTuple):
    """The sources that are complete, and the sum of the outputs of the block that is not; None where it begins."""

    complete: tuple[DepthSource, ...]
    running: Float[Tensor, "b l d"] | None = None

    def all(self) -> tuple[DepthSource, ...]:
        """What a branch may read."""
        if self.running is None:
            return self.complete
        return (*self.complete, DepthSource.of(self.running))


@final
class SourceQuery(nn.Module):
    """The weights of sources v: softmax of q . (w v / RMS(v)) over them, without 1 / sqrt(d).

    q is zero at first, which gives the mean of all sources."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(dim))
        self.key_gain = nn.Parameter(torch.ones(dim))

    def forward(self, sources: Sequence[DepthSource]) -> Float[Tensor, "b l sources"]:
        dtype = sources[0].inverse_rms.dtype
        # one vector for both: a gain of keys is a factor of the query
        query = (self.query * self.key_gain).to(dtype)
        products = torch.stack([source.value.to(dtype) @ query for source in sources], -1)
        return (products * torch.stack([source.inverse_rms for source in sources], -1)).softmax(-1)


@final
class AttentionResiduals(StreamRule[DepthSources]):
    """Every branch, and the end, reads a softmax over what was computed before it (Kimi 2026, arXiv:2603.15031).

    The sources are the embedding and the outputs of all branches, or with `block_layers` the embedding, the sum of each
    complete block of so many layers, and the sum of the current one so far. Their keys are normalized, their values are
    not, and each reader but the first branch has a query of its own. `branches` is the number of branches of each
    layer. Such a model does not begin as a plain one: branches read means, not sums. Weights and sums are computed in
    float32."""

    layers_are_alike: ClassVar[bool] = False

    def __init__(self, dim: int, branches: Sequence[int], *, block_layers: int | None = None) -> None:
        super().__init__()
        self.block_layers = block_layers
        # a layer's weights have its number in their names; the first branch has only the embedding to read
        self.layers = nn.ModuleList(
            nn.ModuleDict({str(branch): SourceQuery(dim) for branch in range(branch_count) if layer > 0 or branch > 0})
            for layer, branch_count in enumerate(branches)
        )
        self.end = SourceQuery(dim)

    def start(self, x: Float[Tensor, "b l d"]) -> DepthSources:
        return DepthSources((DepthSource.of(x),))

    def read(self, streams: DepthSources, place: BranchPlace) -> tuple[Float[Tensor, "b l d"], DepthSources]:
        if place.layer == 0 and place.is_first:
            return streams.complete[0].value, streams
        layer: nn.ModuleDict = self.layers[place.layer]  # type: ignore[assignment]
        return _weighted_sum(streams.all(), layer[str(place.branch)]), streams

    def write(self, streams: DepthSources, place: BranchPlace, y: Float[Tensor, "b l d"]) -> DepthSources:
        if self.block_layers is None:
            return DepthSources((*streams.complete, DepthSource.of(y)))
        block = y if streams.running is None else streams.running + y
        if place.is_last and (place.layer + 1) % self.block_layers == 0:
            return DepthSources((*streams.complete, DepthSource.of(block)))
        return DepthSources(streams.complete, block)

    def finish(self, streams: DepthSources) -> Float[Tensor, "b l d"]:
        return _weighted_sum(streams.all(), self.end)

    def extra_repr(self) -> str:
        return f"block_layers={self.block_layers}"


def _weighted_sum(sources: Sequence[DepthSource], query: nn.Module) -> Float[Tensor, "b l d"]:
    value = sources[0].value
    with autocast_disabled(value.device):
        weights: Tensor = query(sources)
        y = weights[..., 0, None] * value
        for number, source in enumerate(sources[1:], start=1):
            y = y + weights[..., number, None] * source.value
    return y.to(value.dtype)
