"""An encoder that assigns one label to each image."""

import math
from typing import Literal, final

from jaxtyping import Float, Shaped
from torch import Tensor

from manyformer.batches import ImageClassificationBatch
from manyformer.core import Context, Layer, LayerOutput, State, WatchFn, apply_layer, no_watch
from manyformer.models.head import ClassHead
from manyformer.models.model import Model, ModelOutput, apply_head
from manyformer.models.patch_embedding import PatchEmbedding

Pooling = Literal["first", "leading", "mean"]
"""Which tokens of an image a head reads: the first, all learned tokens at the start together, or the mean of all."""


@final
class ImageClassifier(Model[ImageClassificationBatch]):
    """Classifies images (b, h, w, c) by tokens at the start or the mean of all tokens; logits are (b, classes).

    Images are bytes from 0 to 255, or floating point numbers that are used as they are.
    """

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
