"""An encoder that gives an image one label."""

import math
from typing import Literal, final

from jaxtyping import Float, Shaped
from torch import Tensor

from manyformer.batches import Batch, ImageBatch
from manyformer.core import Context, Layer, Out, Watch, ignore
from manyformer.models.base import Loss, Model, ModelOut, Score
from manyformer.models.head import Head
from manyformer.models.patches import Patches

Pool = Literal["first", "mean"]


@final
class ImageClassifier(Model):
    """One label an image, from its first token or from the mean of all; images (b, h, w, c), logits (b, classes).

    Images are bytes from 0 to 255, or floating point numbers that are taken as they are.
    """

    def __init__(self, embed: Patches, body: Layer, head: Head, *, pool: Pool) -> None:
        super().__init__()
        if pool == "first" and embed.leading is None:
            raise ValueError("pool='first' needs a token that stands for the whole image: Patches(..., leading=1)")
        self.embed, self.body, self.head = embed, body, head
        self.pool: Pool = pool
        self.longest = math.prod(embed.shape)

    def forward(self, images: Shaped[Tensor, "b height width channels"], *, watch: Watch = ignore) -> ModelOut:
        pooled = self._pooled(images, watch)
        return ModelOut(self.head(pooled.y), None, pooled.loss)

    def loss(self, batch: Batch, *, smoothing: float = 0.0) -> Loss:
        assert isinstance(batch, ImageBatch)
        pooled = self._pooled(batch.pixels, ignore)
        return self.head.loss(pooled.y, batch.labels, smoothing=smoothing)._replace(extra=pooled.loss)

    def score(self, batch: Batch) -> Score:
        assert isinstance(batch, ImageBatch)
        return self.head.score(self._pooled(batch.pixels, ignore).y, batch.labels)

    def _pooled(self, images: Shaped[Tensor, "b height width channels"], watch: Watch) -> Out:
        place = self.embed.place(images)
        hidden = self.body(self.embed(images, place), Context(place, watch=watch))
        return hidden._replace(y=pool_tokens(hidden.y, self.pool))


def pool_tokens(x: Float[Tensor, "b l d"], pool: Pool) -> Float[Tensor, "b d"]:
    """The first token of each image, or the mean of all."""
    return x[:, 0] if pool == "first" else x.mean(1)
