"""Skips across depth: from the embedding to every layer, from lower to upper layers, and of the middle to the end."""

from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.nn.streams.stream_stack import BranchPlace, StreamRule


class SkippingStreams(NamedTuple):
    """The stream, the embedding, the outputs of lower layers that are still to be read, and that of the middle."""

    x: Float[Tensor, "b l d"]
    embedding: Float[Tensor, "b l d"]
    lower: tuple[Float[Tensor, "b l d"], ...] = ()
    middle: Float[Tensor, "b l d"] | None = None


@final
class DepthSkips(StreamRule[SkippingStreams]):
    """One stream to which branches are added, and up to three skips, whose scales are learned numbers.

    `from_embedding`: before layer n the stream x becomes keep_n x + embed_n x_0, with the stream x_0 below all layers.
    `across` (a U-net): before that, layer n of the upper half adds lower_n times the output of layer depth - 1 - n.
    `backout`: in the end the output of layer depth // 2 is subtracted, times a number. All three are parts of models of
    public speedruns, with these initial scales."""

    def __init__(
        self, depth: int, *, from_embedding: bool = False, across: bool = False, backout: bool = False
    ) -> None:
        super().__init__()
        self.depth = depth
        share = torch.linspace(0, 1, depth)
        self.keep = nn.Parameter(1.15 - 0.1 * share) if from_embedding else None
        self.embed = nn.Parameter(0.2 - 0.15 * share) if from_embedding else None
        self.lower = nn.Parameter(torch.ones(depth // 2)) if across and depth > 1 else None
        self.middle = nn.Parameter(torch.tensor([0.2])) if backout else None

    def start(self, x: Float[Tensor, "b l d"]) -> SkippingStreams:
        return SkippingStreams(x, x)

    def read(self, streams: SkippingStreams, place: BranchPlace) -> tuple[Float[Tensor, "b l d"], SkippingStreams]:
        if not place.is_first:
            return streams.x, streams
        x, embedding, lower, middle = streams
        number_above = place.layer - (self.depth - self.depth // 2)
        if self.lower is not None and number_above >= 0:
            # the highest of the lower outputs is read first
            x = x + self.lower[number_above].to(x.dtype) * lower[-1]
            lower = lower[:-1]
        if self.keep is not None and self.embed is not None:
            keep = self.keep[place.layer].to(x.dtype)
            x = keep * x + self.embed[place.layer].to(x.dtype) * embedding
        return x, SkippingStreams(x, embedding, lower, middle)

    def write(self, streams: SkippingStreams, place: BranchPlace, y: Float[Tensor, "b l d"]) -> SkippingStreams:
        x = streams.x + y
        lower = streams.lower
        middle = streams.middle
        if place.is_last:
            if self.lower is not None and place.layer < self.depth // 2:
                lower = (*lower, x)
            if self.middle is not None and place.layer == self.depth // 2:
                middle = x
        return SkippingStreams(x, streams.embedding, lower, middle)

    def finish(self, streams: SkippingStreams) -> Float[Tensor, "b l d"]:
        if self.middle is None or streams.middle is None:
            return streams.x
        return streams.x - self.middle.to(streams.x.dtype) * streams.middle

    def extra_repr(self) -> str:
        return f"depth={self.depth}"
