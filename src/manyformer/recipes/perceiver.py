"""Perceiver: encoders that read inputs of any length into a small array of latent vectors."""

from functools import partial
from typing import Annotated

from torch import nn

from manyformer.base.errors import UserError
from manyformer.models import ClassHead, ImageClassifier, MaskedLM
from manyformer.models.image_classifier import PatchEmbedding
from manyformer.models.tasks.masked_language_modelling import MASKED_LM
from manyformer.models.tasks.media_labels import IMAGE_CLASSIFICATION
from manyformer.nn.attention.attention import Attention
from manyformer.nn.attention.kv_cache import CrossAttentionSource
from manyformer.nn.attention.latent_array import LatentArrayEncoder, LatentArrayLayer
from manyformer.nn.core import Chain, Layer, Pointwise
from manyformer.nn.feed_forward.feedforward import FeedForward
from manyformer.nn.positions import LearnedPosition
from manyformer.nn.residual import Residual
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.parts.baselines import (
    LoopCount,
    branch,
    init_std,
    learned_embedding,
    scale_residual_init,
    stack,
)
from manyformer.recipes.parts.keywords import ImageChannels, ImageHeight, ImageWidth, PatchSide, PositiveSize
from manyformer.recipes.parts.registry import recipe
from manyformer.recipes.vit import TINY_IMAGES, PatchPositionKind, patch_positions, zero_head

LatentCount = Annotated[PositiveSize, "number of latent vectors that represent an input"]
LatentWidth = Annotated[PositiveSize, "width of a latent vector"]
QueryWidth = Annotated[PositiveSize | None, "width of a head's queries and keys; null means latent_dim / heads"]


@recipe(
    "Perceiver IO",
    paper="Jaegle et al. 2021, Perceiver IO: A General Architecture for Structured Inputs & Outputs, arXiv:2107.14795",
    summary="Latent vectors read the text, attend to one another in depth, and are read by a query for each output.",
    task=MASKED_LM,
    family="low-rank",
    cost="O(l latents d) for reading and writing, O(latents^2 latent_dim + latents latent_dim^2) per layer",
    reasons={"pair_weights": "tokens are read by latents"},
    tiny_keywords={"latents": 5, "latent_dim": 12, "head_dim": 4, "loops": 2},
)
def perceiver(
    vocab: int = 262,
    dim: int = 768,
    depth: int = 26,
    heads: int = 8,
    ff_dim: int | None = None,
    latents: LatentCount = 256,
    latent_dim: LatentWidth = 1280,
    head_dim: QueryWidth = None,
    loops: LoopCount = 1,
    max_length: int = 2048,
    dropout: float = 0.0,
) -> MaskedLM:
    """The model of UTF-8 bytes of section 4.1, which has head_dim=32.

    The latents attend once to the embedded text (section 3.1), then to one another in `depth` layers, `loops` times;
    then the vector of each position attends to them, without a residual sum, and the output has the matrix of the
    embedding. `ff_dim` is latent_dim unless given; the feed-forward layers after reading and writing are as wide as
    what they map. Raises UserError for widths that heads do not divide."""
    for name, width in {"dim": dim, "latent_dim": latent_dim}.items():
        if width % heads:
            raise UserError(f"{name} ({width}) must be a multiple of heads ({heads})")
    embed = learned_embedding(vocab, dim, max_length, dropout=dropout)
    encoder = latent_encoder(
        dim,
        depth,
        heads,
        ff_dim,
        latents=latents,
        latent_dim=latent_dim,
        head_dim=head_dim,
        loops=loops,
        dropout=dropout,
    )
    # the query of a position has no sum with what it reads
    attention = cross_attention(dim, latent_dim, heads, head_dim or latent_dim // heads)
    ff = FeedForward(dim, dim, activation=nn.GELU())
    decoder = Chain(
        query_norm=Pointwise(nn.LayerNorm(dim)),
        attention=attention,
        ff=branch(ff, order="pre", norm=partial(nn.LayerNorm, dim), dropout=dropout),
    )
    # one layer deep: a position is written to once
    scale_residual_init(decoder, 1, std=init_std(dim))
    # queries are vectors of positions alone, whatever stands there: the latents must have read it
    body = LatentArrayLayer(encoder, decoder, queries=LearnedPosition(dim, max_length, std=init_std(dim)))
    return MaskedLM(embed, body, ClassHead(dim, vocab, tied=embed.token, bias=True))


@recipe(
    "Perceiver",
    paper="Jaegle et al. 2021, Perceiver: General Perception with Iterative Attention, arXiv:2103.03206",
    summary="Latent vectors read all pixels or patches of an image once, and attend to one another in depth.",
    task=IMAGE_CLASSIFICATION,
    family="low-rank",
    cost="O(l latents d) for reading, O(latents^2 latent_dim + latents latent_dim^2) per layer, for l patches",
    tiny_keywords={**TINY_IMAGES, "latents": 5, "latent_dim": 12, "head_dim": 4, "loops": 2},
)
def perceiver_classifier(
    classes: int = 1000,
    height: ImageHeight = 224,
    width: ImageWidth = 224,
    channels: ImageChannels = 3,
    patch: PatchSide = 4,
    dim: int = 256,
    depth: int = 6,
    heads: int = 8,
    ff_dim: int | None = None,
    latents: LatentCount = 512,
    latent_dim: LatentWidth = 1024,
    head_dim: QueryWidth = None,
    loops: LoopCount = 8,
    positions: PatchPositionKind = "learned",
    dropout: float = 0.0,
) -> ImageClassifier:
    """An encoder of images whose latents are averaged (section 3); these are the paper's sizes for ImageNet at patch=1.

    Patches are projected to `dim` channels and summed with learned positions, one of the paper's variants; its best one
    has Fourier features of the position beside each pixel. The latents read the image once, as in Perceiver IO
    (arXiv:2107.14795, section 3.1); the first paper repeats it. `ff_dim` is latent_dim unless given. Raises UserError
    for a latent_dim that heads do not divide."""
    if latent_dim % heads:
        raise UserError(f"latent_dim ({latent_dim}) must be a multiple of heads ({heads})")
    shape = (height, width, channels)
    embed = PatchEmbedding(
        shape, patch, dim, position=patch_positions(positions, shape, patch, dim, 0), dropout=dropout
    )
    body = latent_encoder(
        dim,
        depth,
        heads,
        ff_dim,
        latents=latents,
        latent_dim=latent_dim,
        head_dim=head_dim,
        loops=loops,
        dropout=dropout,
    )
    return ImageClassifier(embed, body, zero_head(latent_dim, classes), pool="mean")


def latent_encoder(
    dim: int,
    depth: int,
    heads: int,
    ff_dim: int | None,
    *,
    latents: int,
    latent_dim: int,
    head_dim: int | None,
    loops: int,
    dropout: float,
) -> LatentArrayEncoder:
    """Latents that attend to a sequence of width `dim`, and to one another in `depth` layers, `loops` times."""
    head_dim = head_dim or latent_dim // heads
    # released models of bytes have narrower queries and keys than values
    value_dim = latent_dim // heads
    norm = partial(nn.LayerNorm, latent_dim)
    std = init_std(latent_dim)

    def layer(number: int) -> dict[str, Layer]:
        attention = Attention(latent_dim, heads, SoftmaxKernel(), head_dim=head_dim, value_dim=value_dim)
        return {"attention": attention, "ff": FeedForward(latent_dim, ff_dim or latent_dim, activation=nn.GELU())}

    def add_branch(inner: Layer) -> Residual:
        return branch(inner, order="pre", norm=norm, dropout=dropout)

    reading = Chain(
        attention=add_branch(cross_attention(latent_dim, dim, heads, head_dim)),
        ff=add_branch(FeedForward(latent_dim, latent_dim, activation=nn.GELU())),
    )
    # reading is one layer, whatever the depth of those that follow
    scale_residual_init(reading, 1, std=std)
    layers = stack(depth, layer, order="pre", norm=norm, dropout=dropout, std=std, loops=loops)
    return LatentArrayEncoder(Chain(reading=reading, layers=layers), latents, latent_dim, input_norm=nn.LayerNorm(dim))


def cross_attention(dim: int, source_dim: int, heads: int, head_dim: int) -> Attention:
    """Attention of vectors of width `dim` to a sequence of another width."""
    return Attention(
        dim,
        heads,
        SoftmaxKernel(),
        head_dim=head_dim,
        value_dim=dim // heads,
        source_dim=source_dim,
        source=CrossAttentionSource(),
    )
