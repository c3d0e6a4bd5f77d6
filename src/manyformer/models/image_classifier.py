"""Images as sequences of patches, and an encoder that assigns one label to each image."""

import math
from typing import Any, Literal, final

import torch
from einops import rearrange
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from manyformer.models.embedding import EmbeddedSource, SourceEmbedding
from manyformer.models.head import ClassHead, apply_head
from manyformer.models.model import Model, ModelOutput
from manyformer.models.transformers_call import LABELS_ALONE
from manyformer.nn.batches import ImageClassificationBatch
from manyformer.nn.batches.batch import SegmentLayout
from manyformer.nn.core import (
    Context,
    Layer,
    LayerOutput,
    State,
    TokenPositions,
    WatchFn,
    apply_layer,
    contiguous_positions,
    no_watch,
)
from manyformer.nn.feed_forward.feedforward import init_glorot
from manyformer.nn.positions.position import NoPosition, Position
from manyformer.nn.runtime.dropout import Dropout
from manyformer.nn.runtime.torch_internals import weight_dtype
from manyformer.nn.runtime.training_hooks import UndecayedParameters

MAX_PIXEL_VALUE = 255

PixelScalingName = Literal["symmetric", "imagenet"]
PIXEL_SCALINGS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "symmetric": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
"""The mean and the deviation by which the channels of pixels from 0 to 1 are normalized; of ImageNet's training images,
or so that they are from -1 to 1."""


@final
class PatchEmbedding(SourceEmbedding, UndecayedParameters):
    """Patches of `patch` x `patch` pixels in raster order, each projected to a token (Dosovitskiy et al. 2021, 3.1).

    `leading` learned tokens precede them: one is the paper's class token. They have positions too. Bytes from 0 to 255
    are mapped to -1 to 1, or normalized by the mean and the deviation of ImageNet; images of floating point numbers are
    used as they are, in the model's precision. Raises ValueError if patches do not divide the image, for images of
    another size, and for ImageNet's mean where there are not three channels.
    """

    undecayed = ("leading",)
    tokens: int

    def __init__(
        self,
        shape: tuple[int, int, int],
        patch: int,
        dim: int,
        *,
        position: Position | None = None,
        leading: int = 0,
        dropout: float = 0.0,
        pixel_scaling: PixelScalingName = "symmetric",
    ) -> None:
        super().__init__()
        if pixel_scaling == "imagenet" and shape[2] != 3:
            raise ValueError(f"pixel_scaling='imagenet' is for 3 channels, and images have {shape[2]}")
        self.pixel_scaling = pixel_scaling
        self.tokens = leading + count_patches(shape, patch)
        self.shape = shape
        self.patch = patch
        self.position = NoPosition() if position is None else position
        if self.position.max_length is not None and self.position.max_length < self.tokens:
            raise ValueError(
                f"{self.tokens} tokens need as many positions, and the position encoding has {self.position.max_length}"
            )
        self.project = nn.Linear(patch * patch * shape[2], dim)
        init_glorot(self.project)
        self.leading = nn.Parameter(torch.zeros(leading, dim)) if leading else None
        self.dropout = Dropout(dropout)

    def token_positions(self, images: Shaped[Tensor, "b height width channels"]) -> TokenPositions:
        """The positions of the tokens of these images: each image is a document without padding."""
        return contiguous_positions(images.shape[0], 0, self.tokens, images.device)

    def read_source(
        self,
        source: Shaped[Tensor, "b height width channels"],
        segments: Int[Tensor, "b l"] | None,
        layout: SegmentLayout = None,
    ) -> EmbeddedSource:
        """Embed images, whose patches keep their positions where others are padding."""
        positions = self.token_positions(source)
        if segments is not None:
            # without a layout, which would promise that there is no padding
            positions = TokenPositions(positions.position_ids, segments)
        return EmbeddedSource(self(source, positions), positions)

    def forward(
        self, images: Shaped[Tensor, "b height width channels"], positions: TokenPositions
    ) -> Float[Tensor, "b l d"]:
        if images.shape[1:] != self.shape:
            expected = ", ".join(map(str, self.shape))
            raise ValueError(f"images {tuple(images.shape)} must be (b, {expected}): the model was built for that size")
        x = self.project(split_patches(self._scaled(images), self.patch))
        if self.leading is not None:
            # before the position, because these tokens have positions too
            leading = self.leading.to(x.dtype).expand(x.shape[0], -1, -1)
            x = torch.cat([leading, x], dim=1)
        dropped: Tensor = self.dropout(self.position.embed(x, positions))
        return dropped

    def extra_repr(self) -> str:
        return f"{self.tokens} tokens of images {self.shape}, patch={self.patch}"

    def _scaled(self, images: Tensor) -> Tensor:
        pixels = images.to(weight_dtype(self.project))
        if images.is_floating_point():
            return pixels
        if self.pixel_scaling == "symmetric":
            # one product and one sum in place of the general form below
            return pixels * (2 / MAX_PIXEL_VALUE) - 1
        mean, deviation = map(pixels.new_tensor, PIXEL_SCALINGS[self.pixel_scaling])
        return (pixels / MAX_PIXEL_VALUE - mean) / deviation


def split_patches(images: Float[Tensor, "b height width channels"], patch: int) -> Float[Tensor, "b l values"]:
    """The patches of images in raster order, the values of each in raster order with channels last."""
    rearranged: Any = rearrange(images, "b (h p) (w q) c -> b (h w) (p q c)", p=patch, q=patch)
    patches: Tensor = rearranged
    return patches


def count_patches(shape: tuple[int, int, int], patch: int) -> int:
    """The number of patches of an image (height, width, channels). Raises ValueError if they do not divide it."""
    height, width, _ = shape
    if height % patch or width % patch:
        raise ValueError(f"an image of {height} x {width} cannot be cut into patches of {patch} x {patch}")
    return height * width // patch**2


Pooling = Literal["first", "leading", "mean"]
"""Which tokens of an image a head reads: the first, all learned tokens at the start together, or the mean of all."""


@final
class ImageClassifier(Model[ImageClassificationBatch]):
    """Classifies images (b, h, w, c) by tokens at the start or the mean of all tokens; logits are (b, classes).

    Images are bytes from 0 to 255, or floating point numbers that are used as they are.
    """

    call_form = LABELS_ALONE

    def __init__(self, embed: PatchEmbedding, body: Layer, head: ClassHead, *, pool: Pooling) -> None:
        super().__init__()
        if pool != "mean" and embed.leading is None:
            raise ValueError(f"pool='{pool}' needs a class token: PatchEmbedding(..., leading=1)")
        self.embed = embed
        self.body = body
        self.head = head
        self.pool: Pooling = pool
        self.max_length = math.prod(embed.shape)

    def forward(self, images: Shaped[Tensor, "b height width channels"], *, watch: WatchFn = no_watch) -> ModelOutput:
        pooled = self._pool(images, watch)
        return ModelOutput(apply_head(self.head, pooled.y), None, pooled.loss)

    def head_inputs(self, batch: ImageClassificationBatch, state: State) -> tuple[LayerOutput, Tensor]:
        return self._pool(batch.pixels, no_watch), batch.labels

    def _pool(self, images: Shaped[Tensor, "b height width channels"], watch: WatchFn) -> LayerOutput:
        positions = self.embed.token_positions(images)
        hidden = apply_layer(self.body, self.embed(images, positions), Context(positions, watch=watch))
        return LayerOutput(self._pool_tokens(hidden.y), hidden.state, hidden.loss)

    def _pool_tokens(self, x: Float[Tensor, "b l d"]) -> Float[Tensor, "b e"]:
        if self.pool == "mean":
            return x.mean(1)
        if self.embed.leading is None or self.pool == "first":
            leading = 1
        else:
            leading = len(self.embed.leading)
        return x[:, :leading].flatten(1)
