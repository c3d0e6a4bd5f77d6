"""Residual branches, layer stacks and initialization that several recipes share."""

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
    """`inner` as a residual branch, normalized after the sum, before the branch, or before and after the branch."""
    join = AddJoin(dropout=dropout) if dropout else None
    if order == "post":
        return Residual(inner, post_norm=norm(), join=join)
    if order == "pre":
        return Residual(inner, pre_norm=norm(), join=join)
    if order == "sandwich":
        return Residual(inner, pre_norm=norm(), inner_norm=norm(), join=join)
    raise ValueError(f"norm_order ('{order}') must be post, pre or sandwich")


def stack(
    depth: int,
    layer: Callable[[], dict[str, Layer]],
    *,
    order: NormOrder,
    norm: NormMaker,
    dropout: float,
    streams: ResidualStreams = "plain",
) -> Chain:
    """`depth` layers, each a chain of branches; all orders but post-norm end in a final norm, as in their papers.

    With "reversible" streams, branches are added alternately to two streams, and no activations are stored (see
    `ReversibleStack`).
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

    GPT-2 and BERT have 0.02 at that width. With 0.02 narrow models take longer to train.
    """
    return math.sqrt(2 / (5 * dim))


def scale_residual_init(body: nn.Module, depth: int, *, std: float) -> None:
    """Initialize all matrices from N(0, std^2), output projections of branches with std / sqrt(2 depth).

    Radford et al. 2019, section 2.3: the sum of 2 x depth branches then starts at the scale of one.
    """
    for name, module in body.named_modules():
        if isinstance(module, nn.Linear):
            is_branch_output = name.endswith((".out_proj", ".down"))
            nn.init.normal_(module.weight, std=std / (2 * depth) ** 0.5 if is_branch_output else std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
