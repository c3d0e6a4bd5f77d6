"""The Vision Transformer: an encoder of images as sequences of patches."""

from functools import partial
from typing import Annotated, Literal

from torch import nn

from manyformer.base.errors import UserError
from manyformer.models import ClassHead, ImageClassifier
from manyformer.models.image_classifier import PatchEmbedding, PixelScalingName, Pooling, count_patches
from manyformer.models.tasks.media_labels import IMAGE_CLASSIFICATION
from manyformer.nn.positions import ConcatenatedGridPosition, LearnedPosition, NoPosition, Position
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.parts.baselines import LayerMakers, attention_layers, init_std, stack
from manyformer.recipes.parts.keywords import ImageChannels, ImageHeight, ImageWidth, NormEps, PatchSide
from manyformer.recipes.parts.registry import recipe

PatchPositionKind = Annotated[
    Literal["learned", "axes", "none"], "patch positions: learned, learned for rows and columns (axes), or none"
]

ImagePooling = Annotated[
    Literal["first", "mean"],
    "representation of the whole image: a class token at the start, or the mean over patches",
]

DistillationToken = Annotated[
    Literal["none", "unread", "read"],
    "DeiT's second learned token: none, one that the head does not read, or one that it reads beside the class token",
]

PixelScaling = Annotated[
    PixelScalingName, "bytes of pixels become numbers from -1 to 1, or are normalized by ImageNet's mean and deviation"
]

POSITION_STD = 0.5**0.5
"""The initial deviation of learned positions: that of sines and cosines."""

TINY_IMAGES = {"height": 8, "width": 12, "channels": 2, "patch": 4}


@recipe(
    "Vision Transformer",
    paper="Dosovitskiy et al. 2021, An Image is Worth 16x16 Words, arXiv:2010.11929",
    summary="An image is a sequence of patches for a standard encoder.",
    task=IMAGE_CLASSIFICATION,
    family="softmax",
    cost="O(l^2 d + l d^2) per layer, for l = height width / patch^2 patches",
    tiny_keywords=TINY_IMAGES,
)
def vit(
    classes: int = 1000,
    height: ImageHeight = 224,
    width: ImageWidth = 224,
    channels: ImageChannels = 3,
    patch: PatchSide = 16,
    dim: int = 768,
    depth: int = 12,
    heads: int = 12,
    ff_dim: int | None = None,
    positions: PatchPositionKind = "learned",
    pool: ImagePooling = "first",
    dropout: float = 0.1,
    norm_eps: NormEps = 1e-6,
    distillation_token: DistillationToken = "none",
    pixel_scaling: PixelScaling = "symmetric",
) -> ImageClassifier:
    """ViT-B/16 by default: pre-norm, GELU, a class token, learned positions in one dimension; section 3.1.

    `positions="axes"` are two halves, one for the row and one for the column (appendix D.4). `pool="mean"` averages
    all patches and has no class token. The head is one projection initialized to 0, as the paper's for fine-tuning.
    Attention weights have no dropout. Positions are initialized with the deviation of sinusoids, the paper's with small
    random numbers: so identical patches, as on a plain background, are distinguished from the first step. DeiT, of
    Touvron et al. (2021, arXiv:2012.12877), has a `distillation_token`; in evaluation they average its head and that of
    the class token, which is one head that reads both. Raises UserError for such a token with another `pool`."""
    if distillation_token != "none" and pool != "first":
        raise UserError(f"distillation_token ({distillation_token}) stands beside a class token: set pool to first")
    # learned tokens in front of the patches: the class token, and DeiT's that learns from a teacher
    leading = 0
    if distillation_token != "none":
        leading = 2
    elif pool == "first":
        leading = 1
    layer = attention_layers(dim, heads, ff_dim, lambda number: SoftmaxKernel())
    shape = (height, width, channels)
    return image_classifier(
        classes,
        shape,
        patch,
        dim,
        depth,
        layer,
        positions=positions,
        pool="leading" if distillation_token == "read" else pool,
        dropout=dropout,
        norm_eps=norm_eps,
        leading=leading,
        pixel_scaling=pixel_scaling,
    )


def image_classifier(
    classes: int,
    shape: tuple[int, int, int],
    patch: int,
    dim: int,
    depth: int,
    layer: LayerMakers,
    *,
    positions: PatchPositionKind,
    pool: Pooling,
    dropout: float,
    norm_eps: float = 1e-6,
    leading: int | None = None,
    pixel_scaling: PixelScalingName = "symmetric",
) -> ImageClassifier:
    """The Vision Transformer with these layers; norms have the epsilon of the paper's models unless given.

    `leading` is the number of learned tokens at the start, by default one for a pool that reads it."""
    leading = int(pool != "mean") if leading is None else leading
    position = patch_positions(positions, shape, patch, dim, leading)
    # a patch is projected as a vector of all its values, which is the paper's convolution with stride = width
    embed = PatchEmbedding(
        shape, patch, dim, position=position, leading=leading, dropout=dropout, pixel_scaling=pixel_scaling
    )
    norm = partial(nn.LayerNorm, dim, eps=norm_eps)
    body = stack(depth, layer, order="pre", norm=norm, dropout=dropout, std=init_std(dim))
    return ImageClassifier(embed, body, zero_head(dim * (leading if pool == "leading" else 1), classes), pool=pool)


def patch_positions(
    kind: PatchPositionKind, shape: tuple[int, int, int], patch: int, dim: int, leading: int
) -> Position:
    """Positions of patches that follow `leading` other tokens."""
    if kind == "none":
        return NoPosition()
    if kind == "learned":
        return LearnedPosition(dim, leading + count_patches(shape, patch), std=POSITION_STD)
    # row and column have half of the channels each
    if dim % 2:
        raise ValueError(f"dim ({dim}) must be even for positions='axes': one half is for the row, one for the column")
    axes = [LearnedPosition(dim // 2, size // patch, std=POSITION_STD) for size in shape[:2]]
    return ConcatenatedGridPosition([size // patch for size in shape[:2]], axes, prefix_tokens=leading)


def zero_head(dim: int, classes: int) -> ClassHead:
    """A classification head initialized to 0, so that all classes start equal."""
    head = ClassHead(dim, classes, bias=True)
    nn.init.zeros_(head.weight)
    return head
