"""The keywords of residual streams: one, two reversible ones, or several that branches read and write by a rule."""

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from typing import Annotated, Any, Literal, NamedTuple

from annotated_types import Ge

from manyformer.base.errors import UserError
from manyformer.nn.streams import (
    AttentionResiduals,
    DynamicConnection,
    HyperConnections,
    ManifoldConnection,
    ManifoldHead,
    StaticConnection,
    StreamRule,
    UnmixedConnection,
)
from manyformer.recipes.parts.keywords import PositiveSize

ResidualStreams = Annotated[
    Literal["plain", "reversible", "hyper", "hyper-static", "mhc", "mhc-unmixed", "attention", "attention-blocks"],
    "one residual stream (plain); two reversible ones, for which no activations are stored; several side by side, "
    "whose weights are those of each token (hyper), fixed (hyper-static) or bounded, with Sinkhorn's normalization "
    "(mhc) or without mixing (mhc-unmixed); or a softmax over the outputs of all branches (attention) or of blocks of "
    "layers (attention-blocks) below",
]
StreamCount = Annotated[
    Annotated[int, Ge(2)] | None, "streams side by side, where residual_streams is hyper or mhc; null means 4"
]
BlockLayers = Annotated[
    PositiveSize | None,
    "layers of a block, where residual_streams is attention-blocks; null means as few as make eight blocks or fewer",
]

StreamRuleMaker = Callable[[Sequence[int]], StreamRule[Any]]
"""Makes the rule of a stack from the number of branches of each layer."""

Streams = Literal["plain", "reversible"] | StreamRuleMaker
"""What `stack` puts around its layers."""

STREAM_COUNT = 4
MOST_BLOCKS = 8


class StreamSizes(NamedTuple):
    """The sizes that rules are made from: the width, and the keywords `stream_count` and `block_layers`."""

    dim: int
    streams: int
    block_layers: int | None


def _static(sizes: StreamSizes, branches: Sequence[int]) -> StreamRule[Any]:
    return HyperConnections(sizes.streams, branches, partial(StaticConnection, sizes.streams))


def _dynamic(sizes: StreamSizes, branches: Sequence[int]) -> StreamRule[Any]:
    return HyperConnections(sizes.streams, branches, partial(DynamicConnection, sizes.dim, sizes.streams))


def _bounded(
    connection: type[ManifoldConnection] | type[UnmixedConnection], sizes: StreamSizes, branches: Sequence[int]
) -> StreamRule[Any]:
    make = partial(connection, sizes.dim, sizes.streams)
    return HyperConnections(sizes.streams, branches, make, ManifoldHead(sizes.dim, sizes.streams))


def _attention(sizes: StreamSizes, branches: Sequence[int]) -> StreamRule[Any]:
    return AttentionResiduals(sizes.dim, branches)


def _attention_blocks(sizes: StreamSizes, branches: Sequence[int]) -> StreamRule[Any]:
    block_layers = sizes.block_layers or ceil(len(branches) / MOST_BLOCKS)
    return AttentionResiduals(sizes.dim, branches, block_layers=block_layers)


STREAM_RULES: dict[str, Callable[[StreamSizes, Sequence[int]], StreamRule[Any]]] = {
    "hyper": _dynamic,
    "hyper-static": _static,
    "mhc": partial(_bounded, ManifoldConnection),
    "mhc-unmixed": partial(_bounded, UnmixedConnection),
    "attention": _attention,
    "attention-blocks": _attention_blocks,
}
"""From sizes and the number of branches of each layer to the rule of the name."""


def residual_streams_of(
    name: ResidualStreams, dim: int, *, count: int | None = None, block_layers: int | None = None
) -> Streams:
    """What `stack` puts around its layers, by the keywords. Raises UserError for a size that others have."""
    if count is not None and not name.startswith(("hyper", "mhc")):
        raise UserError(f"stream_count ({count}) is for residual_streams=hyper, hyper-static, mhc or mhc-unmixed")
    if block_layers is not None and name != "attention-blocks":
        raise UserError(f"block_layers ({block_layers}) is for residual_streams=attention-blocks")
    if name == "plain" or name == "reversible":
        return name
    return partial(STREAM_RULES[name], StreamSizes(dim, count or STREAM_COUNT, block_layers))
