"""The encoder-decoder Transformer with relative positions in its attention instead of absolute ones."""

from typing import Annotated, Literal

from manyformer.models import EncoderDecoder
from manyformer.models.tasks.translation import TRANSLATION
from manyformer.nn.attention.attention import Attention
from manyformer.nn.core import Layer
from manyformer.nn.masks import Causal
from manyformer.nn.positions import NoPosition, ShawPosition
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.parts.baselines import NormOrder, encoder_decoder
from manyformer.recipes.parts.keywords import MaxRelativeDistance
from manyformer.recipes.parts.registry import recipe


@recipe(
    "Relative positions",
    paper="Shaw et al. 2018, Self-Attention with Relative Position Representations, arXiv:1803.02155",
    summary="Learned embeddings of relative distance are added to the keys and values of each pair of tokens.",
    task=TRANSLATION,
    family="softmax",
    cost="O(l^2 d + l d^2) per layer",
    reasons={"convex_weights": "positions are added to the values"},
    tiny_keywords={"max_relative_distance": 3},
)
def shaw(
    vocab: int = 37000,
    source_vocab: int | None = None,
    dim: int = 512,
    depth: int = 6,
    heads: int = 8,
    ff_dim: int | None = None,
    max_relative_distance: MaxRelativeDistance = 16,
    tables: Annotated[
        Literal["head", "layer"], "relative position tables for each head, or one for all heads of a layer"
    ] = "head",
    dropout: float = 0.1,
    norm_order: NormOrder = "post",
) -> EncoderDecoder:
    """`transformer` with the positions of section 3 in the self-attention of both sides, and no sinusoids.

    Distances are clipped to `max_relative_distance`. Section 4.1: the base model has tables for each head
    (`tables="head"`) and clips at 16, the big one has tables for each layer and clips at 8. Cross-attention has no
    positions. A language model with the same positions is `compose` with `position="shaw"`."""
    # None: one table, which all heads of the layer read
    table_heads = heads if tables == "head" else None

    def encoder_attention(number: int) -> Layer:
        position = ShawPosition(dim // heads, max_relative_distance, heads=table_heads, direction="both")
        return Attention(dim, heads, SoftmaxKernel(), position=position)

    def decoder_attention(number: int) -> Layer:
        # a causal layer has no later keys, so its table holds half of the distances
        position = ShawPosition(dim // heads, max_relative_distance, heads=table_heads, direction="past")
        return Attention(dim, heads, SoftmaxKernel(Causal()), position=position)

    sizes = (vocab, source_vocab, dim, depth, heads, ff_dim, dropout, norm_order)
    return encoder_decoder(
        *sizes,
        # what would be added to embeddings: nothing, as the paper found sinusoids to add nothing
        make_position=NoPosition,
        make_encoder_attention=encoder_attention,
        make_decoder_attention=decoder_attention,
    )
