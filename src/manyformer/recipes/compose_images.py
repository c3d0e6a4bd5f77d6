"""Free mixing for images: a classifier of patches from a mixer by name, for grids of ablations."""

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from torch import nn

from manyformer.attention import Attention
from manyformer.core import Layer
from manyformer.feedforward import FeedForward
from manyformer.kernels import LinearKernel, LinformerKernel, SoftmaxKernel
from manyformer.kernels.features import EluPlusOneFeatures
from manyformer.kernels.length_projection import LearnedLengthProjection
from manyformer.mixers import DenseScores, FixedScores, FourierMixer, PairTable, SynthesizerAttention, TokenMLP
from manyformer.models import ImageClassifier
from manyformer.models.image_classifier import Pooling
from manyformer.models.patch_embedding import PatchEmbedding, count_patches
from manyformer.recipes.gmlp import gate, near_zero
from manyformer.recipes.registry import recipe
from manyformer.recipes.vit import NO_TEXT, SMALL_IMAGES, PatchPositionKind, image_body, patch_positions, zero_head

MixerName = Literal["softmax", "linear", "linformer", "fourier", "tokens", "gate", "dense", "random"]


class ImageComposeSizes(NamedTuple):
    """What mixers may be built from."""

    dim: int
    heads: int
    tokens: int
    slots: int


MIXERS: dict[MixerName, Callable[[ImageComposeSizes], Iterator[Layer]]] = {
    "softmax": lambda s: _each(lambda: Attention(s.dim, s.heads, SoftmaxKernel())),
    "linear": lambda s: _each(lambda: Attention(s.dim, s.heads, LinearKernel(EluPlusOneFeatures()))),
    # the paper's best sharing: one projection for all layers
    "linformer": lambda s: _linformer(s, LearnedLengthProjection(s.tokens, s.slots)),
    # nothing norms what it adds to the stream here
    "fourier": lambda s: _each(lambda: FourierMixer(norm="ortho")),
    "tokens": lambda s: _each(lambda: TokenMLP(s.tokens, s.dim // 2)),
    "gate": lambda s: _each(lambda: gate(s.dim, 2 * s.dim, PairTable(s.tokens, std=near_zero(s.tokens)))),
    "dense": lambda s: _each(lambda: SynthesizerAttention(s.dim, [DenseScores(s.dim, s.heads, s.tokens)])),
    "random": lambda s: _each(
        lambda: SynthesizerAttention(s.dim, [FixedScores(PairTable(s.tokens, heads=s.heads, std=s.tokens**-0.5))])
    ),
}
"""From sizes to the mixers of one layer after the other."""


@recipe(
    "Compose for images",
    paper="a frame for comparisons, after Dosovitskiy et al. 2021, arXiv:2010.11929",
    summary="Classifiers of images that differ in nothing but what mixes their patches.",
    task="image-classification",
    padding_invariant=False,
    cost="that of its parts",
    reasons=NO_TEXT,
    tiny_keywords={**SMALL_IMAGES, "slots": 4},
)
def compose_images(
    classes: int = 10,
    height: int = 28,
    width: int = 28,
    channels: int = 1,
    patch: int = 4,
    dim: int = 128,
    depth: int = 4,
    heads: int = 4,
    ff_dim: int | None = None,
    mixer: MixerName = "softmax",
    slots: int = 16,
    positions: PatchPositionKind = "learned",
    pool: Pooling = "mean",
    dropout: float = 0.0,
) -> ImageClassifier:
    """`vit` with another mixer in place of its attention, and the mean over patches unless told otherwise.

    "fourier" is FNet's, "tokens" MLP-Mixer's, "gate" gMLP's, "dense" and "random" are Synthesizers; "linformer" has
    `slots`. All stand beside the same feed-forward layers, also the one that gMLP does without.
    """
    shape = (height, width, channels)
    leading = 1 if pool == "first" else 0
    sizes = ImageComposeSizes(dim, heads, leading + count_patches(shape, patch), slots)
    each = MIXERS[mixer](sizes)

    def layer() -> dict[str, Layer]:
        return {"mixer": next(each), "ff": FeedForward(dim, ff_dim, activation=nn.GELU())}

    position = patch_positions(positions, shape, patch, dim, leading)
    embed = PatchEmbedding(shape, patch, dim, position=position, leading=leading, dropout=dropout)
    body = image_body(dim, depth, layer, dropout)
    return ImageClassifier(embed, body, zero_head(dim, classes), pool=pool)


def _each(make: Callable[[], Layer]) -> Iterator[Layer]:
    while True:
        yield make()


def _linformer(sizes: ImageComposeSizes, shared: LearnedLengthProjection) -> Iterator[Layer]:
    return _each(lambda: Attention(sizes.dim, sizes.heads, LinformerKernel(shared)))
