"""Free mixing: a language model from parts by name, for grids of ablations."""

from collections.abc import Callable
from functools import partial
from typing import Literal

from torch import nn

from manyformer.attention import Attention
from manyformer.core import Layer
from manyformer.feedforward import FeedForward, GatedFeedForward
from manyformer.kernels import Kernel, Softmax
from manyformer.masks import Causal
from manyformer.models import Embedding, Head, LanguageModel
from manyformer.position import Learned, NoPosition, Position, Sinusoid
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import NormOrder, stack

PositionName = Literal["sinusoid", "learned", "none"]
KernelName = Literal["softmax"]
FeedForwardName = Literal["relu", "gelu", "swiglu", "geglu"]
NormName = Literal["layer", "rms"]

KERNELS: dict[KernelName, Callable[[], Kernel]] = {"softmax": lambda: Softmax(Causal())}

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
) -> LanguageModel:
    """A causal language model; `longest` is what learned positions need, the others take any length."""
    positions: dict[PositionName, Callable[[], Position]] = {
        "sinusoid": lambda: Sinusoid(dim),
        "learned": lambda: Learned(dim, longest),
        "none": NoPosition,
    }

    def layer() -> dict[str, Layer]:
        return {
            "attention": Attention(dim, heads, KERNELS[kernel](), kv_heads=kv_heads),
            "ff": FEEDFORWARDS[feedforward](dim, hidden),
        }

    embed = Embedding(vocab, dim, position=positions[position](), scale=dim**0.5, dropout=dropout)
    body = stack(depth, layer, order=norm, norm=partial(NORMS[norm_kind], dim), dropout=dropout)
    return LanguageModel(embed, body, Head(dim, vocab, tied=embed.token))
