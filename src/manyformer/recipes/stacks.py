"""Residual branches, layer stacks and initialization that several recipes share."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Literal

from torch import nn

from manyformer.core import Chain, Layer, Pointwise
from manyformer.depth import ReversibleStack
from manyformer.errors import UserError
from manyformer.experts import ExpertLinear
from manyformer.recipes.keywords import PositiveSize
from manyformer.residual import AddJoin, Residual, ResidualJoin

NormOrder = Literal["post", "pre", "sandwich"]
ResidualStreams = Annotated[
    Literal["plain", "reversible"],
    "one residual stream (plain), or two reversible ones, for which no activations are stored",
]
LoopCount = Annotated[PositiveSize, "how many times the layers are applied, with the same weights each time"]
NormMaker = Callable[[], nn.Module]
LayerMaker = Callable[[int], Mapping[str, Layer] | Layer]
"""Makes the layer of a number, counted from 0: its branches by name, or a complete layer."""
LayerMakers = LayerMaker | Sequence[LayerMaker]
"""A maker of all layers, or several that take turns."""


def branch(
    inner: Layer, *, order: NormOrder, norm: NormMaker, dropout: float = 0.0, join: ResidualJoin | None = None
) -> Residual:
    """`inner` as a residual branch, normalized after the sum, before the branch, or before and after the branch.

    `join` takes the place of the sum after `dropout`."""
    if dropout and join is None:
        join = AddJoin(dropout=dropout)
    if order == "post":
        return Residual(inner, post_norm=norm(), join=join)
    if order == "pre":
        return Residual(inner, pre_norm=norm(), join=join)
    if order == "sandwich":
        return Residual(inner, pre_norm=norm(), inner_norm=norm(), join=join)
    raise ValueError(f"norm_order ('{order}') must be post, pre or sandwich")


def stack(
    depth: int,
    layer: LayerMakers,
    *,
    order: NormOrder,
    norm: NormMaker,
    dropout: float,
    streams: ResidualStreams = "plain",
    std: float | None = None,
    join: Callable[[], ResidualJoin | None] = lambda: None,
    loops: int = 1,
) -> Chain:
    """`depth` layers made by `layer`, or by several makers in turn; all orders but post-norm end in a final norm.

    The layers are applied `loops` times, with the same weights (Bae et al. 2024, arXiv:2410.20672, section 2.2: CYCLE).

    A mapping becomes a chain of residual branches with norms and dropout, except parts that are residual branches
    already; a layer is taken as it is. With "reversible" streams, branches are added alternately to two streams, and no
    activations are stored (see `ReversibleStack`). `std` initializes the matrices with `scale_residual_init`. `join`
    makes the join of each branch, None for the sum after `dropout`. Raises UserError for reversible loops."""
    if loops > 1 and streams == "reversible":
        raise UserError(f"loops ({loops}) need residual_streams=plain: a reversible layer is applied once")

    def complete(parts: Mapping[str, Layer] | Layer) -> Layer:
        if isinstance(parts, Layer):
            return parts
        add_branch = partial(branch, order=order, norm=norm, dropout=dropout)
        return Chain(
            **{
                name: part if isinstance(part, Residual) else add_branch(part, join=join())
                for name, part in parts.items()
            }
        )

    makers = [layer] if callable(layer) else layer
    made = [complete(makers[number % len(makers)](number)) for number in range(depth)]
    layers = {str(number): part for number, part in enumerate(made * loops)}
    if streams == "reversible":
        body: dict[str, Layer] = {"layers": ReversibleStack(**layers)}
    else:
        body = layers
    if order != "post":
        body["norm"] = Pointwise(norm())
    chain = Chain(**body)
    if std is not None:
        scale_residual_init(chain, depth * loops, std=std)
    return chain


def makers_of_pattern(pattern: str, makers: Mapping[str, LayerMaker]) -> list[LayerMaker]:
    """The makers of layers by the letters of a pattern, which take turns in `stack`. Raises UserError for others."""
    if not pattern or set(pattern) - makers.keys():
        raise UserError(f"pattern ('{pattern}') must have one letter or more, of {', '.join(makers)}")
    return [makers[letter] for letter in pattern]


def check_heads(dim: int, heads: int) -> None:
    """Raise UserError unless `heads` divides `dim`."""
    if dim % heads:
        raise UserError(f"dim ({dim}) must be a multiple of heads ({heads})")


def head_width(dim: int, heads: int, head_dim: int | None) -> int:
    """The width of a head: `head_dim`, or by default dim / heads. Raises UserError where heads must divide dim."""
    if head_dim is not None:
        return head_dim
    check_heads(dim, heads)
    return dim // heads


def init_std(dim: int) -> float:
    """The deviation sqrt(2 / (5 dim)) of Nguyen and Salazar 2019 (arXiv:1910.05895), section 2.2; 0.023 at dim 768.

    GPT-2 and BERT have 0.02 at that width. With 0.02 narrow models take longer to train."""
    return math.sqrt(2 / (5 * dim))


def scale_residual_init(body: nn.Module, depth: int, *, std: float) -> None:
    """Initialize all matrices from N(0, std^2), output projections of branches with std / sqrt(2 depth).

    Radford et al. 2019, section 2.3: the sum of 2 x depth branches then starts at the scale of one."""
    for name, module in body.named_modules():
        if isinstance(module, nn.Linear | ExpertLinear):
            is_branch_output = name.endswith((".out_proj", ".down"))
            nn.init.normal_(module.weight, std=std / (2 * depth) ** 0.5 if is_branch_output else std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
