"""Linformer: an encoder whose keys and values are projected to a fixed length."""

from collections.abc import Callable
from typing import Annotated, Literal

from manyformer.base.errors import UserError
from manyformer.models import MaskedLM
from manyformer.models.tasks.masked_language_modelling import MASKED_LM
from manyformer.nn.kernels.kernel import Kernel
from manyformer.nn.low_rank.linformer_kernel import (
    ConvolvedLengthProjection,
    LearnedLengthProjection,
    LengthProjection,
    LinformerKernel,
    PooledLengthProjection,
)
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.parts.baselines import NormOrder, attention_layers, learned_embedding, masked_lm
from manyformer.recipes.parts.keywords import PositiveSize, ProjectedLength
from manyformer.recipes.parts.registry import recipe

ProjectionSharing = Annotated[
    Literal["none", "heads", "keys-values", "layers"],
    "what shares a projection: nothing, all heads, also keys and values, or also all layers",
]
ProjectionKind = Annotated[
    Literal["learned", "mean", "max", "convolution"],
    "how keys are projected along the sequence: learned weights, mean or max pooling, or a convolution",
]


@recipe(
    "Linformer",
    paper="Wang et al. 2020, Linformer: Self-Attention with Linear Complexity, arXiv:2006.04768",
    summary="Attention matrices have nearly low rank: keys and values are projected to a fixed length.",
    task=MASKED_LM,
    family="low-rank",
    cost="O(l projected_length d + l d^2) per layer",
    reasons={
        "causal": "every projected key mixes all tokens, so later ones cannot be masked",
        "attention_dropout": "weights are those of projected keys",
        "convex_weights": "keys and values are projected to other ones, with weights of any sign",
        "pair_weights": "weights are those of projected keys",
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
    projected_length: ProjectedLength = 128,
    top_projected_length: Annotated[
        PositiveSize | None,
        "number of projected keys in the topmost layer, interpolated in between; null means the same",
    ] = None,
    projection: ProjectionKind = "learned",
    projection_sharing: ProjectionSharing = "layers",
    dropout: float = 0.1,
    norm_order: NormOrder = "post",
) -> MaskedLM:
    """A masked language model like the paper's RoBERTa, sections 4 and 5; otherwise as `bert`.

    Keys and values are projected to `projected_length` in the lowest layer, interpolated to `top_projected_length` in
    the topmost. `projection_sharing` says what shares a projection: nothing, all heads, also keys and values, or also
    all layers. Sequences may have any length up to `max_length`. A `projected_length` of null is plain attention in the
    same frame, for comparison."""
    if projected_length is None and top_projected_length is not None:
        raise UserError(f"top_projected_length ({top_projected_length}) needs a projected_length in the lowest layer")
    if top_projected_length is None:
        top_length = projected_length
    else:
        top_length = top_projected_length
    if projection_sharing == "layers" and top_length != projected_length:
        raise ValueError(
            f"projection_sharing='layers' is one projection for all layers: they cannot have projected lengths from "
            f"{projected_length} to {top_length}"
        )
    if projection in ("mean", "max") and projection_sharing != "layers":
        raise ValueError(f"projection='{projection}' has no weights to share: projection_sharing must be 'layers'")
    embed = learned_embedding(vocab, dim, max_length, dropout=dropout)
    make_projection = _projection_maker(projection, max_length, heads, dim // heads, projection_sharing)
    shared_projection = None
    if projected_length is not None and projection_sharing == "layers":
        shared_projection = make_projection(projected_length)

    def kernel(number: int) -> Kernel:
        if projected_length is None or top_length is None:
            return SoftmaxKernel()
        if shared_projection is not None:
            return LinformerKernel(shared_projection, shared_projection)
        layer_length = projected_length + round((top_length - projected_length) * number / max(1, depth - 1))
        key_projection = make_projection(layer_length)
        shares_values = projection_sharing == "keys-values"
        # without "keys-values" a layer has a second matrix (l, k) for its values
        return LinformerKernel(key_projection, key_projection if shares_values else make_projection(layer_length))

    layer = attention_layers(dim, heads, ff_dim, kernel)
    return masked_lm(embed, depth, layer, dropout=dropout, norm_order=norm_order)


def _projection_maker(
    projection: ProjectionKind, max_length: int, heads: int, head_dim: int, sharing: ProjectionSharing
) -> Callable[[int], LengthProjection]:
    """A function from a projected length to a projection."""
    # a matrix for each head, or one that all heads of the layer read through
    projection_heads = heads if sharing == "none" else 1

    def make(projected_length: int) -> LengthProjection:
        if projection == "learned":
            return LearnedLengthProjection(max_length, projected_length, heads=projection_heads)
        if projection == "convolution":
            return ConvolvedLengthProjection(max_length, projected_length, key_dim=head_dim, heads=projection_heads)
        return PooledLengthProjection(max_length, projected_length, reduction=projection)

    return make
