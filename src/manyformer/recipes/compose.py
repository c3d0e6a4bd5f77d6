"""Free mixing: a language model from parts by name, for grids of ablations."""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

from torch import nn

from manyformer.attention import Attention
from manyformer.core import Layer
from manyformer.feedforward import FeedForward, GatedFeedForward, in_pieces
from manyformer.kernels import LSH, DynamicRotary, Kernel, Softmax
from manyformer.kernels import Linear as LinearAttention
from manyformer.kernels.features import Cosine, Deterministic, EluPlusOne, Fourier, Generalized, Positive, Taylor
from manyformer.kernels.rules import Delta, Gated
from manyformer.masks import Causal, Window, fixed, strided, union
from manyformer.models import Embedding, Head, LanguageModel
from manyformer.position import (
    NTK,
    XL,
    Alibi,
    DistanceAware,
    DynamicNTK,
    Learned,
    Linear,
    NoPosition,
    Position,
    Rotary,
    Shaw,
    Sinusoid,
    T5Buckets,
    XLBiases,
    YaRN,
)
from manyformer.recipes.bigbird import past
from manyformer.recipes.registry import recipe
from manyformer.recipes.rfa import FLOOR as RFA_FLOOR
from manyformer.recipes.stacks import NormOrder, Streams, stack

PositionName = Literal[
    "sinusoid",
    "learned",
    "none",
    "rope",
    "rope-linear",
    "rope-ntk",
    "rope-dynamic",
    "rope-yarn",
    "xl",
    "da",
    "alibi",
    "t5",
    "shaw",
]
KernelName = Literal[
    "softmax",
    "window",
    "strided",
    "fixed",
    "random-blocks",
    "linear",
    "delta",
    "cosine",
    "taylor",
    "favor",
    "favor-relu",
    "rfa",
    "rfa-gate",
    "lsh",
]
FeedForwardName = Literal["relu", "gelu", "swiglu", "geglu"]
NormName = Literal["layer", "rms"]


class Sizes(NamedTuple):
    """What positions and kernels may be built from; `width` is that of a head."""

    dim: int
    width: int
    heads: int
    kv_heads: int
    longest: int
    stretch: float


POSITIONS: dict[PositionName, Callable[[Sizes], Callable[[], Position]]] = {
    "sinusoid": lambda sizes: lambda: Sinusoid(sizes.dim),
    "learned": lambda sizes: lambda: Learned(sizes.dim, sizes.longest),
    "none": lambda sizes: NoPosition,
    "rope": lambda sizes: _shared(Rotary(sizes.width)),
    "rope-linear": lambda sizes: _shared(Rotary(sizes.width, scaling=Linear(sizes.stretch))),
    "rope-ntk": lambda sizes: _shared(Rotary(sizes.width, scaling=NTK(sizes.stretch))),
    "rope-yarn": lambda sizes: _shared(Rotary(sizes.width, scaling=YaRN(sizes.stretch, sizes.longest))),
    "xl": lambda sizes: _xl(sizes),
    "da": lambda sizes: lambda: DistanceAware(sizes.heads),
    "alibi": lambda sizes: _shared(Alibi(sizes.heads)),
    # the paper has one table for all layers
    "t5": lambda sizes: _shared(T5Buckets(sizes.heads, sides="past")),
    "shaw": lambda sizes: lambda: Shaw(sizes.width, sides="past"),
    # what its angles are depends on the query, so the kernel turns the keys
    "rope-dynamic": lambda sizes: NoPosition,
}
"""From sizes to what makes the position of the embedding, or of one layer's attention after the other."""

FEATURES = 4
"""Random features for each channel of a head."""

WINDOW = 128
"""Positions in a window; blocks and strides of the other patterns are a quarter of it."""

BUCKETS = 16
"""Buckets that each round of hashing has."""

KERNELS: dict[KernelName, Callable[[Sizes], Kernel]] = {
    "softmax": lambda sizes: Softmax(Causal()),
    "window": lambda sizes: Softmax(Window(WINDOW)),
    "strided": lambda sizes: Softmax(union(strided(WINDOW // 4))),
    "fixed": lambda sizes: Softmax(union(fixed(WINDOW // 4, WINDOW // 16))),
    "random-blocks": lambda sizes: Softmax(past(WINDOW // 4, 2, -(-sizes.longest // (WINDOW // 4)), 0)),
    "linear": lambda sizes: LinearAttention(EluPlusOne(), Causal()),
    "delta": lambda sizes: LinearAttention(Deterministic(), Causal(), rule=Delta()),
    "cosine": lambda sizes: LinearAttention(Cosine(sizes.longest), Causal()),
    "taylor": lambda sizes: LinearAttention(Taylor(), Causal()),
    "favor": lambda sizes: LinearAttention(Positive(sizes.width, FEATURES * sizes.width, redraw=1000), Causal()),
    "favor-relu": lambda sizes: LinearAttention(
        Generalized(sizes.width, FEATURES * sizes.width, redraw=1000), Causal()
    ),
    "rfa": lambda sizes: LinearAttention(_fourier(sizes), Causal(), floor=RFA_FLOOR),
    "rfa-gate": lambda sizes: LinearAttention(_fourier(sizes), Causal(), rule=Gated(), floor=RFA_FLOOR),
    "lsh": lambda sizes: LSH(buckets=BUCKETS, chunk=WINDOW // 4, rounds=4),
}

FEEDFORWARDS: dict[FeedForwardName, Callable[[int, int | None], Layer]] = {
    "relu": FeedForward,
    "gelu": lambda dim, hidden: FeedForward(dim, hidden, activation=nn.GELU()),
    "swiglu": GatedFeedForward,
    "geglu": lambda dim, hidden: GatedFeedForward(dim, hidden, activation=nn.GELU()),
}

NORMS: dict[NormName, Callable[[int], nn.Module]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}


@recipe(
    "Any mixture of parts",
    paper="none: a bench for comparing parts",
    new="Every part by name, so that one of them can be changed and the rest kept.",
    task="language-model",
    causal=True,
    streams=True,
    cost="that of its parts",
    because={"cross": "a language model reads one sequence only"},
)
def compose(
    vocab: int = 256,
    dim: int = 256,
    depth: int = 4,
    heads: int = 4,
    kv_heads: int | None = None,
    hidden: int | None = None,
    longest: int = 1024,
    position: PositionName = "sinusoid",
    kernel: KernelName = "softmax",
    feedforward: FeedForwardName = "gelu",
    norm: NormOrder = "pre",
    norm_kind: NormName = "layer",
    dropout: float = 0.0,
    stretch: float = 4.0,
    residual: Streams = "plain",
    ff_chunk: int | None = None,
) -> LanguageModel:
    """A causal language model; `longest` is what learned positions and "cosine" need, the others take any length.

    "rope" is rotary (RoFormer's causal form); its scalings reach `stretch` times `longest`, the length trained for.
    """
    sizes = Sizes(dim, dim // heads, heads, kv_heads or heads, longest, stretch)
    make = POSITIONS[position](sizes)
    embedded = make()
    inside = bool(embedded.touches() - {"embed"})

    def attend() -> Kernel:
        found = KERNELS[kernel](sizes)
        dynamic = position == "rope-dynamic"
        return DynamicRotary(found, sizes.width, DynamicNTK(stretch, longest)) if dynamic else found

    def layer() -> dict[str, Layer]:
        return {
            "attention": Attention(dim, heads, attend(), kv_heads=kv_heads, position=make() if inside else None),
            "ff": in_pieces(FEEDFORWARDS[feedforward](dim, hidden), ff_chunk),
        }

    embed = Embedding(vocab, dim, position=None if inside else embedded, scale=dim**0.5, dropout=dropout)
    kind = partial(NORMS[norm_kind], dim)
    body = stack(depth, layer, order=norm, norm=kind, dropout=dropout, streams=residual)
    return LanguageModel(embed, body, Head(dim, vocab, tied=embed.token))


def _fourier(sizes: Sizes) -> Fourier:
    return Fourier(sizes.width, FEATURES * sizes.width, heads=sizes.kv_heads, redraw=1)


def _xl(sizes: Sizes) -> Callable[[], Position]:
    """Transformer-XL's positions, all layers with the same biases, as in the paper."""
    biases = XLBiases(sizes.heads, sizes.width)
    return lambda: XL(sizes.dim, sizes.heads, width=sizes.width, biases=biases)


def _shared(position: Position) -> Callable[[], Position]:
    """One part for all layers, so that they share its tables."""
    return lambda: position
