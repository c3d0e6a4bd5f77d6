"""Hyper-connections: several residual streams side by side, which branches read, mix and write by learned weights."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import count
from typing import ClassVar, NamedTuple, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.nn.runtime.length_norms import rms_norm
from manyformer.nn.runtime.torch_internals import autocast_disabled
from manyformer.nn.runtime.training_hooks import UndecayedParameters
from manyformer.nn.streams.stream_stack import BranchPlace, StreamRule

NORM_EPS = 1e-6
"""The epsilon of the norms of streams that weights are computed from."""


class ParallelStreams(NamedTuple):
    """Streams side by side; while a branch computes, they are mixed already, and `write` is how it will be added."""

    h: Float[Tensor, "b l n d"]
    write: Float[Tensor, "*bl n"] | None = None


class ConnectionWeights(NamedTuple):
    """The weights of one branch, those of each token (b, l, ...) or the same ones for all.

    The branch reads the sum of `read`[j] times stream j and is added to stream k with the factor `write`[k]. Meanwhile
    stream k becomes the sum of `mix`[j, k] times stream j; None leaves the streams as they are."""

    read: Float[Tensor, "*bl n"]
    mix: Float[Tensor, "*bl n n"] | None
    write: Float[Tensor, "*bl n"]


class Connection(nn.Module, ABC):
    """The weights of one branch as a function of the streams, of which each token is by itself."""

    @abstractmethod
    def forward(self, h: Float[Tensor, "b l n d"]) -> ConnectionWeights:
        """The weights of streams `h`, which are given in float32 or wider."""


@final
class StaticConnection(Connection, UndecayedParameters):
    """Weights that are the same for all tokens (Zhu et al. 2024, arXiv:2409.19606, section 2.2).

    They begin as those of one stream: branch number m reads stream m mod n, streams are not mixed, all get its output.
    """

    undecayed = ("mix",)

    def __init__(self, streams: int, number: int) -> None:
        super().__init__()
        self.read = nn.Parameter(F.one_hot(torch.tensor(number % streams), streams).float())
        self.mix = nn.Parameter(torch.eye(streams))
        self.write = nn.Parameter(torch.ones(streams))

    def forward(self, h: Float[Tensor, "b l n d"]) -> ConnectionWeights:
        dtype = h.dtype
        return ConnectionWeights(self.read.to(dtype), self.mix.to(dtype), self.write.to(dtype))


@final
class DynamicConnection(Connection, UndecayedParameters):
    """Static weights plus small ones of each token (Zhu et al. 2024, arXiv:2409.19606, section 2.3).

    What stream j contributes to weights is s tanh(W RMS(h_j)): `projection` W has a row for reading, n for mixing and
    one for writing, at first zeros; `scale` are s of reading and mixing, and s of writing, at first 0.01."""

    undecayed = ("projection",)

    def __init__(self, dim: int, streams: int, number: int) -> None:
        super().__init__()
        self.static = StaticConnection(streams, number)
        self.projection = nn.Parameter(torch.zeros(streams + 2, dim))
        self.scale = nn.Parameter(torch.full((2,), 0.01))

    def forward(self, h: Float[Tensor, "b l n d"]) -> ConnectionWeights:
        static = self.static(h)
        shares = F.linear(rms_norm(h, eps=NORM_EPS), self.projection.to(h.dtype)).tanh()
        connection_scale, write_scale = self.scale.to(h.dtype)
        return ConnectionWeights(
            static.read + connection_scale * shares[..., 0],
            static.mix + connection_scale * shares[..., 1:-1],
            static.write + write_scale * shares[..., -1],
        )


@final
class HyperConnections(StreamRule[ParallelStreams]):
    """Streams side by side, read, mixed and written by the `Connection` of each branch (Zhu et al. 2024).

    `branches` is the number of branches of each layer; `make` makes the connection of a branch by its number from 0.
    All streams begin as the input. `head` makes one of them in the end; by default it is their mean, where the paper
    has the sum: before a norm they differ by its epsilon alone, and with the mean a model begins as the plain one.
    Weights are computed in float32, streams have the dtype of the input."""

    layers_are_alike: ClassVar[bool] = False

    def __init__(
        self, streams: int, branches: Sequence[int], make: Callable[[int], Connection], head: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.streams = streams
        numbers = count()
        # a list for each layer, so that a layer's weights have its number in their names
        self.layers = nn.ModuleList(
            nn.ModuleList(make(next(numbers)) for _ in range(branch_count)) for branch_count in branches
        )
        self.head = head

    def start(self, x: Float[Tensor, "b l d"]) -> ParallelStreams:
        return ParallelStreams(x[:, :, None].expand(-1, -1, self.streams, -1))

    def read(self, streams: ParallelStreams, place: BranchPlace) -> tuple[Float[Tensor, "b l d"], ParallelStreams]:
        h = streams.h
        layer: nn.ModuleList = self.layers[place.layer]  # type: ignore[assignment]
        with autocast_disabled(h.device):
            wide = h.to(torch.promote_types(h.dtype, torch.float32))
            weights: ConnectionWeights = layer[place.branch](wide)
            x = (weights.read[..., None, :] @ wide).squeeze(-2).to(h.dtype)
            if weights.mix is not None:
                h = (weights.mix.mT.contiguous() @ wide).to(h.dtype)
        return x, ParallelStreams(h, weights.write)

    def write(self, streams: ParallelStreams, place: BranchPlace, y: Float[Tensor, "b l d"]) -> ParallelStreams:
        assert streams.write is not None
        h = streams.h
        return ParallelStreams(h + streams.write.to(h.dtype)[..., None] * y[:, :, None])

    def finish(self, streams: ParallelStreams) -> Float[Tensor, "b l d"]:
        if self.head is None:
            return streams.h.mean(2)
        y: Tensor = self.head(streams.h)
        return y

    def extra_repr(self) -> str:
        return f"streams={self.streams}"
