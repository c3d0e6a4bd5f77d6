"""The keywords of recipes that read several modalities, and the embeddings that they decide."""

from typing import Annotated

from manyformer.errors import UserError
from manyformer.models import PatchEmbedding
from manyformer.models.embedding import SourceEmbedding
from manyformer.models.frame_embedding import FrameEmbedding
from manyformer.models.modalities_model import PartEmbedding
from manyformer.position import SinusoidalPosition
from manyformer.recipes.baselines import sinusoidal_embedding
from manyformer.recipes.keywords import PositiveSize
from manyformer.recipes.vit import patch_positions

ReadImageHeight = Annotated[PositiveSize | None, "height of images, null for no image; the data decides it in a run"]
ReadImageWidth = Annotated[PositiveSize | None, "width of images, null for no image; the data decides it in a run"]
ReadImageChannels = Annotated[
    PositiveSize | None, "channels of images, null for no image; the data decides it in a run"
]
ReadMelBands = Annotated[
    PositiveSize | None, "mel bands of a frame of sound, null for no sound; the data decides it in a run"
]


def part_embedding(
    dim: int,
    *,
    vocab: int | None,
    image: tuple[int | None, int | None, int | None],
    patch: int,
    mels: int | None,
    halvings: int,
    dropout: float,
) -> PartEmbedding:
    """The embeddings of the parts that are not None; images have learned positions, the others sinusoids."""
    parts: dict[str, SourceEmbedding] = {}
    height, width, channels = image
    if None in image and any(image):
        raise UserError(f"an image has a height, a width and channels, and these are {height}, {width} and {channels}")
    if height is not None and width is not None and channels is not None:
        shape = (height, width, channels)
        position = patch_positions("learned", shape, patch, dim, 0)
        parts["image"] = PatchEmbedding(shape, patch, dim, position=position, dropout=dropout)
    if mels is not None:
        sinusoids = SinusoidalPosition(dim)
        # a quarter of the channels, so that convolutions cost less than the layers
        parts["sound"] = FrameEmbedding(
            mels, dim, halvings=halvings, channels=-(-dim // 4), position=sinusoids, dropout=dropout
        )
    if vocab is not None:
        parts["text"] = sinusoidal_embedding(vocab, dim, dropout=dropout)
    return PartEmbedding(dim, parts)
