"""Stacks that several recipes share: how norms stand around branches, and layers repeated."""

import math
from collections.abc import Callable
from typing import Literal

from torch import nn

from manyformer.core import AddJoin, Chain, Layer, Pointwise, Residual
from manyformer.depth import ReversibleStack

NormOrder = Literal["post", "pre", "sandwich"]
ResidualStreams = Literal["plain", "reversible"]
NormMaker = Callable[[], nn.Module]


def branch(inner: Layer, *, order: NormOrder, norm: NormMaker, dropout: float = 0.0) -> Residual:
    """`inner` on a residual stream, its norms placed after the sum, before the branch, or around the branch."""
    join = AddJoin(dropout=dropout) if dropout else None
    if order == "post":
        return Residual(inner, post_norm=norm(), join=join)
    if order == "pre":
        return Residual(inner, pre_norm=norm(), join=join)
    if order == "sandwich":
        return Residual(inner, pre_norm=norm(), inner_norm=norm(), join=join)
    raise ValueError(f"norm ('{order}') must be post, pre or sandwich")


def stack(
    depth: int,
    layer: Callable[[], dict[str, Layer]],
    *,
    order: NormOrder,
    norm: NormMaker,
    dropout: float,
    streams: ResidualStreams = "plain",
) -> Chain:
    """`depth` layers, each a chain of branches; all orders but post-norm end in one more norm, as their papers say.

    With "reversible" streams, branches add in turn to two of them, and keep no activations (see `ReversibleStack`).
    """
    layers: dict[str, Chain] = {
        str(number): Chain(
            **{name: branch(part, order=order, norm=norm, dropout=dropout) for name, part in layer().items()}
        )
        for number in range(depth)
    }
    body: dict[str, Layer] = {"layers": ReversibleStack(**layers)} if streams == "reversible" else {**layers}
    if order != "post":
        body["norm"] = Pointwise(norm())
    return Chain(**body)


def init_std(dim: int) -> float:
    """The deviation sqrt(2 / (5 dim)) of Nguyen and Salazar 2019 (arXiv:1910.05895), section 2.2; 0.023 at dim 768.

    GPT-2 and BERT have 0.02 at that width. Kept at 0.02 in narrow models, it leaves them untrained for longer.
    """
    return math.sqrt(2 / (5 * dim))


def scale_residual_init(body: nn.Module, depth: int, *, std: float) -> None:
    """Draw all matrices from N(0, std^2), those that write to the stream by 1/sqrt(2 depth) smaller.

    Radford et al. 2019, section 2.3: the sum of 2 x depth branches then starts at the size of one.
    """
    for name, module in body.named_modules():
        if isinstance(module, nn.Linear):
            writes = name.endswith((".out_proj", ".down"))
            nn.init.normal_(module.weight, std=std / (2 * depth) ** 0.5 if writes else std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
