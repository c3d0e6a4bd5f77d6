"""Free mixing for images: a classifier of patches from a mixer by name, for grids of ablations."""

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from torch import nn

from manyformer.attention import Attention
from manyformer.core import Layer
from manyformer.feedforward import FeedForward
from manyformer.kernels import Linear, Linformer, Softmax
from manyformer.kernels.features import EluPlusOne
from manyformer.kernels.lengthwise import Projected
from manyformer.mixers import Dense, Fixed, Fourier, Synthesizer, Table, TokenMLP
from manyformer.models import ImageClassifier
from manyformer.models.image_classifier import Pool
from manyformer.models.patches import Patches, count_patches
from manyformer.recipes.gmlp import gate, near_zero
from manyformer.recipes.registry import recipe
from manyformer.recipes.vit import NO_TEXT, SMALL_IMAGES, Places, image_body, patch_positions, zero_head

MixerName = Literal["softmax", "linear", "linformer", "fourier", "tokens", "gate", "dense", "random"]


class Sizes(NamedTuple):
    """What mixers may be built from."""

    dim: int
    heads: int
    tokens: int
    slots: int


MIXERS: dict[MixerName, Callable[[Sizes], Iterator[Layer]]] = {
    "softmax": lambda s: _each(lambda: Attention(s.dim, s.heads, Softmax())),
    "linear": lambda s: _each(lambda: Attention(s.dim, s.heads, Linear(EluPlusOne()))),
    # the paper's best sharing: one projection for all layers
    "linformer": lambda s: _linformer(s, Projected(s.tokens, s.slots)),
    # nothing norms what it adds to the stream here
    "fourier": lambda s: _each(lambda: Fourier(norm="ortho")),
    "tokens": lambda s: _each(lambda: TokenMLP(s.tokens, s.dim // 2)),
    "gate": lambda s: _each(lambda: gate(s.dim, 2 * s.dim, Table(s.tokens, std=near_zero(s.tokens)))),
    "dense": lambda s: _each(lambda: Synthesizer(s.dim, [Dense(s.dim, s.heads, s.tokens)])),
    "random": lambda s: _each(lambda: Synthesizer(s.dim, [Fixed(Table(s.tokens, heads=s.heads, std=s.tokens**-0.5))])),
}
"""From sizes to the mixers of one layer after the other."""


@recipe(
    "Compose for images",
    paper="a frame for comparisons, after Dosovitskiy et al. 2021, arXiv:2010.11929",
    new="Classifiers of images that differ in nothing but what mixes their patches.",
    task="image-classification",
    padding=False,
    cost="that of its parts",
    because=NO_TEXT,
    small={**SMALL_IMAGES, "slots": 4},
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
    hidden: int | None = None,
    mixer: MixerName = "softmax",
    slots: int = 16,
    positions: Places = "learned",
    pool: Pool = "mean",
    dropout: float = 0.0,
) -> ImageClassifier:
    """`vit` with another mixer in place of its attention, and the mean over patches unless told otherwise.

    "fourier" is FNet's, "tokens" MLP-Mixer's, "gate" gMLP's, "dense" and "random" are Synthesizers; "linformer" has
    `slots`. All stand beside the same feed-forward layers, also the one that gMLP does without.
    """
    shape = (height, width, channels)
    leading = 1 if pool == "first" else 0
    sizes = Sizes(dim, heads, leading + count_patches(shape, patch), slots)
    each = MIXERS[mixer](sizes)

    def layer() -> dict[str, Layer]:
        return {"mixer": next(each), "ff": FeedForward(dim, hidden, activation=nn.GELU())}

    position = patch_positions(positions, shape, patch, dim, leading)
    embed = Patches(shape, patch, dim, position=position, leading=leading, dropout=dropout)
    body = image_body(dim, depth, layer, dropout)
    return ImageClassifier(embed, body, zero_head(dim, classes), pool=pool)


def _each(make: Callable[[], Layer]) -> Iterator[Layer]:
    while True:
        yield make()


def _linformer(sizes: Sizes, shared: Projected) -> Iterator[Layer]:
    return _each(lambda: Attention(sizes.dim, sizes.heads, Linformer(shared)))
