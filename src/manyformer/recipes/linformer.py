"""Linformer: an encoder whose attention has low rank."""

from collections.abc import Callable, Iterator
from typing import Literal

from manyformer.kernels import Linformer
from manyformer.kernels.lengthwise import Convolved, Lengthwise, Pooled, Projected
from manyformer.models import MaskedLM
from manyformer.recipes.alike import learned, masked_lm
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import NormOrder

Sharing = Literal["none", "heads", "keys-values", "layers"]
Projection = Literal["learned", "mean", "max", "convolution"]


@recipe(
    "Linformer",
    paper="Wang et al. 2020, Linformer: Self-Attention with Linear Complexity, arXiv:2006.04768",
    new="Attention has nearly low rank: a fixed number of mixtures of the keys stands for all of them.",
    task="masked",
    cost="O(l slots d + l d^2) per layer",
    because={
        "causal": "every slot mixes all tokens, so that no later one could be hidden",
        "streams": "a later token changes all earlier outputs, so nothing can be kept",
        "cross": "it reads one sequence only",
    },
    small={"slots": 8},
)
def linformer(
    vocab: int = 30522,
    dim: int = 768,
    depth: int = 12,
    heads: int = 12,
    hidden: int | None = None,
    longest: int = 512,
    slots: int = 128,
    top_slots: int | None = None,
    projection: Projection = "learned",
    sharing: Sharing = "layers",
    dropout: float = 0.1,
    norm: NormOrder = "post",
) -> MaskedLM:
    """Learns masked tokens as the paper's RoBERTa does, sections 4 and 5; otherwise as `bert`.

    `slots` are those of the lowest layer; towards the topmost they change evenly to `top_slots`. `sharing` says who
    has the same projection: nobody, all heads, also keys and values, also all layers. Of any length up to `longest`.
    """
    last = slots if top_slots is None else top_slots
    if sharing == "layers" and last != slots:
        raise ValueError(f"sharing='layers' is one projection for all layers: they cannot have {slots} to {last} slots")
    if projection in ("mean", "max") and sharing != "layers":
        raise ValueError(f"projection='{projection}' learns nothing that could be shared: sharing must be 'layers'")
    each = _kernels(depth, slots, last, sharing, _maker(projection, longest, heads, dim // heads, sharing))
    embed = learned(vocab, dim, longest, dropout=dropout)
    return masked_lm(embed, depth, heads, hidden, lambda: next(each), dropout=dropout, norm=norm)


def _maker(projection: Projection, longest: int, heads: int, key: int, sharing: Sharing) -> Callable[[int], Lengthwise]:
    """From a number of slots to a projection."""
    own = heads if sharing == "none" else 1

    def make(slots: int) -> Lengthwise:
        if projection == "learned":
            return Projected(longest, slots, heads=own)
        if projection == "convolution":
            return Convolved(longest, slots, key=key, heads=own)
        return Pooled(longest, slots, by=projection)

    return make


def _kernels(
    depth: int, first: int, last: int, sharing: Sharing, make: Callable[[int], Lengthwise]
) -> Iterator[Linformer]:
    """The kernels of the layers from the lowest on."""
    for_all = make(first) if sharing == "layers" else None
    for layer in range(depth):
        slots = first + round((last - first) * layer / max(1, depth - 1))
        keys = make(slots) if for_all is None else for_all
        yield Linformer(keys, make(slots) if sharing in ("none", "heads") else keys)
