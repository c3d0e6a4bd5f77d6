"""LinformerKernel: an encoder whose attention has low rank."""

from collections.abc import Callable, Iterator
from typing import Literal

from manyformer.kernels import LinformerKernel
from manyformer.kernels.length_projection import (
    ConvolvedLengthProjection,
    LearnedLengthProjection,
    LengthProjection,
    PooledLengthProjection,
)
from manyformer.models import MaskedLM
from manyformer.recipes.baselines import learned_embedding, masked_lm
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import NormOrder

ProjectionSharing = Literal["none", "heads", "keys-values", "layers"]
ProjectionKind = Literal["learned", "mean", "max", "convolution"]


@recipe(
    "Linformer",
    paper="Wang et al. 2020, Linformer: Self-Attention with Linear Complexity, arXiv:2006.04768",
    summary="Attention has nearly low rank: a fixed number of mixtures of the keys stands for all of them.",
    task="masked",
    cost="O(l slots d + l d^2) per layer",
    reasons={
        "causal": "every slot mixes all tokens, so that no later one could be hidden",
        "incremental_decoding": "a later token changes all earlier outputs, so nothing can be kept",
        "cross_attention": "it reads one sequence only",
    },
    tiny_keywords={"projected_length": 8},
)
def linformer(
    vocab: int = 30522,
    dim: int = 768,
    depth: int = 12,
    heads: int = 12,
    ff_dim: int | None = None,
    max_length: int = 512,
    projected_length: int = 128,
    top_projected_length: int | None = None,
    projection: ProjectionKind = "learned",
    projection_sharing: ProjectionSharing = "layers",
    dropout: float = 0.1,
    norm_order: NormOrder = "post",
) -> MaskedLM:
    """Learns masked tokens as the paper's RoBERTa does, sections 4 and 5; otherwise as `bert`.

    `projected_length` are those of the lowest layer; towards the topmost they change evenly to `top_projected_length`.
    `projection_sharing` says who has the same projection: nobody, all heads, also keys and values, also all layers. Of
    any length up to `max_length`."""
    last = projected_length if top_projected_length is None else top_projected_length
    if projection_sharing == "layers" and last != projected_length:
        raise ValueError(
            f"sharing='layers' is one projection for all layers: they cannot have {projected_length} to {last} slots"
        )
    if projection in ("mean", "max") and projection_sharing != "layers":
        raise ValueError(f"projection='{projection}' learns nothing that could be shared: sharing must be 'layers'")
    each = _kernels(
        depth,
        projected_length,
        last,
        projection_sharing,
        _maker(projection, max_length, heads, dim // heads, projection_sharing),
    )
    embed = learned_embedding(vocab, dim, max_length, dropout=dropout)
    return masked_lm(embed, depth, heads, ff_dim, lambda: next(each), dropout=dropout, norm_order=norm_order)


def _maker(
    projection: ProjectionKind, max_length: int, heads: int, key: int, sharing: ProjectionSharing
) -> Callable[[int], LengthProjection]:
    """From a number of slots to a projection."""
    own = heads if sharing == "none" else 1

    def make(slots: int) -> LengthProjection:
        if projection == "learned":
            return LearnedLengthProjection(max_length, slots, heads=own)
        if projection == "convolution":
            return ConvolvedLengthProjection(max_length, slots, key=key, heads=own)
        return PooledLengthProjection(max_length, slots, by=projection)

    return make


def _kernels(
    depth: int, first: int, last: int, sharing: ProjectionSharing, make: Callable[[int], LengthProjection]
) -> Iterator[LinformerKernel]:
    """The kernels of the layers from the lowest on."""
    for_all = make(first) if sharing == "layers" else None
    for layer in range(depth):
        slots = first + round((last - first) * layer / max(1, depth - 1))
        keys = make(slots) if for_all is None else for_all
        yield LinformerKernel(keys, make(slots) if sharing in ("none", "heads") else keys)
