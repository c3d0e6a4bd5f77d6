"""MLP-Mixer: feed-forward layers over patches and over channels in turn."""

from functools import partial
from typing import Annotated

from torch import nn

from manyformer.models import ImageClassifier
from manyformer.models.image_classifier import PatchEmbedding, count_patches
from manyformer.models.tasks.media_labels import IMAGE_CLASSIFICATION
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward.feedforward import FeedForward
from manyformer.nn.token_mixing import TokenMLP
from manyformer.recipes.parts.baselines import stack
from manyformer.recipes.parts.keywords import ImageChannels, ImageHeight, ImageWidth, PatchSide, PositiveSize
from manyformer.recipes.parts.registry import recipe
from manyformer.recipes.vit import TINY_IMAGES, zero_head


@recipe(
    "MLP-Mixer",
    paper="Tolstikhin et al. 2021, MLP-Mixer: An all-MLP Architecture for Vision, arXiv:2105.01601",
    summary="A feed-forward layer over patches, shared by all channels, replaces attention.",
    task=IMAGE_CLASSIFICATION,
    family="mixing",
    cost="O(l token_mlp_dim d + l d^2) per layer, for l = height width / patch^2 patches",
    reasons={"heads": "a feed-forward layer mixes patches"},
    tiny_keywords={**TINY_IMAGES, "token_mlp_dim": 10},
)
def mlp_mixer(
    classes: int = 1000,
    height: ImageHeight = 224,
    width: ImageWidth = 224,
    channels: ImageChannels = 3,
    patch: PatchSide = 16,
    dim: int = 768,
    depth: int = 12,
    token_mlp_dim: Annotated[
        PositiveSize | None, "width of the hidden layer that mixes patches; null means half of dim"
    ] = None,
    ff_dim: int | None = None,
    dropout: float = 0.0,
) -> ImageClassifier:
    """Mixer-B/16 by default: pre-norm, GELU, no positions, mean pooling, a head initialized to 0; section 2.

    `token_mlp_dim` is the width of the layer over patches, dim / 2 unless given; its weights fix the number of patches.
    """
    shape = (height, width, channels)
    patches = count_patches(shape, patch)

    def layer(number: int) -> dict[str, Layer]:
        # acts on columns of the table (patches, channels), each channel alone
        token_mlp = TokenMLP(patches, max(1, dim // 2) if token_mlp_dim is None else token_mlp_dim)
        return {"mixer": token_mlp, "ff": FeedForward(dim, ff_dim, activation=nn.GELU())}

    # the epsilon of the released code, which is flax's default
    norm = partial(nn.LayerNorm, dim, eps=1e-6)
    body = stack(depth, layer, order="pre", norm=norm, dropout=dropout)
    embed = PatchEmbedding(shape, patch, dim, dropout=dropout)
    return ImageClassifier(embed, body, zero_head(dim, classes), pool="mean")
