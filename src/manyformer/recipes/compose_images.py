"""An image classifier whose patch mixer is chosen by name, for ablations."""

from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple

from torch import nn

from manyformer.attention import Attention
from manyformer.core import Layer
from manyformer.feedforward import FeedForward
from manyformer.kernels import LinearKernel, LinformerKernel, SoftmaxKernel
from manyformer.kernels.features import EluPlusOneFeatures
from manyformer.kernels.length_projection import LearnedLengthProjection
from manyformer.mixers import DenseScores, FixedScores, FourierMixer, PairTable, SynthesizerAttention, TokenMLP
from manyformer.models import ImageClassifier
from manyformer.models.patch_embedding import count_patches
from manyformer.recipes.gmlp import position_weight_std, spatial_gate
from manyformer.recipes.keywords import ImageChannels, ImageHeight, ImageWidth, PatchSide, PositiveSize
from manyformer.recipes.registry import recipe
from manyformer.recipes.vit import TINY_IMAGES, ImagePooling, PatchPositionKind, image_classifier
from manyformer.tasks.media_labels import IMAGE_CLASSIFICATION

MixerName = Annotated[
    Literal["softmax", "linear", "linformer", "fourier", "tokens", "gate", "dense", "random"],
    "the layer that mixes patches: a kind of attention, or a layer without attention",
]


class ImageComposeSizes(NamedTuple):
    """The sizes that mixers are built from."""

    dim: int
    heads: int
    tokens: int
    projected_length: int


MIXERS: dict[MixerName, Callable[[ImageComposeSizes], Callable[[], Layer]]] = {
    "softmax": lambda s: lambda: Attention(s.dim, s.heads, SoftmaxKernel()),
    "linear": lambda s: lambda: Attention(s.dim, s.heads, LinearKernel(EluPlusOneFeatures())),
    # the paper's best sharing: one projection for all layers
    "linformer": lambda s: _linformer_mixer(s, LearnedLengthProjection(s.tokens, s.projected_length)),
    # its output is added to the residual stream without a norm
    "fourier": lambda s: lambda: FourierMixer(norm="ortho"),
    "tokens": lambda s: lambda: TokenMLP(s.tokens, s.dim // 2),
    "gate": lambda s: lambda: spatial_gate(s.dim, 2 * s.dim, PairTable(s.tokens, std=position_weight_std(s.tokens))),
    "dense": lambda s: lambda: SynthesizerAttention(s.dim, [DenseScores(s.dim, s.heads, s.tokens)]),
    "random": lambda s: (
        lambda: SynthesizerAttention(s.dim, [FixedScores(PairTable(s.tokens, heads=s.heads, std=s.tokens**-0.5))])
    ),
}
"""From sizes to a function that makes the mixer of each layer in turn."""


@recipe(
    "Compose for images",
    paper="a testbed for comparisons, after Dosovitskiy et al. 2021, arXiv:2010.11929",
    summary="Image classifiers that differ only in the layer that mixes their patches.",
    task=IMAGE_CLASSIFICATION,
    cost="that of its parts",
    tiny_keywords={**TINY_IMAGES, "projected_length": 4},
)
def compose_images(
    classes: int = 10,
    height: ImageHeight = 28,
    width: ImageWidth = 28,
    channels: ImageChannels = 1,
    patch: PatchSide = 4,
    dim: int = 128,
    depth: int = 4,
    heads: int = 4,
    ff_dim: int | None = None,
    mixer: MixerName = "softmax",
    projected_length: Annotated[
        PositiveSize, "number of projected keys that replace all keys, where mixer is linformer"
    ] = 16,
    positions: PatchPositionKind = "learned",
    pool: ImagePooling = "mean",
    dropout: float = 0.0,
) -> ImageClassifier:
    """`vit` with another mixer in place of attention, and mean pooling by default.

    "fourier" is FNet's, "tokens" MLP-Mixer's, "gate" gMLP's, "dense" and "random" are Synthesizers; "linformer" has
    `projected_length`. All have the same feed-forward layers, which gMLP itself does not have."""
    shape = (height, width, channels)
    tokens = count_patches(shape, patch) + (1 if pool == "first" else 0)
    sizes = ImageComposeSizes(dim, heads, tokens, projected_length)
    make_mixer = MIXERS[mixer](sizes)

    def layer(number: int) -> dict[str, Layer]:
        return {"mixer": make_mixer(), "ff": FeedForward(dim, ff_dim, activation=nn.GELU())}

    return image_classifier(classes, shape, patch, dim, depth, layer, positions=positions, pool=pool, dropout=dropout)


def _linformer_mixer(sizes: ImageComposeSizes, projection: LearnedLengthProjection) -> Callable[[], Layer]:
    return lambda: Attention(sizes.dim, sizes.heads, LinformerKernel(projection))
