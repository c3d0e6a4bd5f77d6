"""The tasks of assigning one label to each image, or to each recording."""

import math
from collections.abc import Callable, Mapping
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Int, UInt8
from numpy.typing import NDArray
from torch import Tensor

from manyformer.base.errors import UserError
from manyformer.models import AudioClassifier, ImageClassifier, PatchEmbedding
from manyformer.models.tasks.label_task import BatchLabelTask
from manyformer.models.tasks.requests import ImagePass, ImageTokenizer, TextPass
from manyformer.models.tasks.toy import ROWS, STAND_IN_IDS, Toy, ToyDraw, stand_in_vectors
from manyformer.nn.batches import AudioClassificationBatch, ImageClassificationBatch
from manyformer.nn.model_inputs import Inputs

BRIGHTNESS_LEVELS = 256
"""The number of values of a pixel's channel, which is a token of an image."""
FRAMES_PER_SYMBOL = 4


@final
class ImageClassification(BatchLabelTask[ImageClassifier]):
    """Assigns one label to each image; tokens are the values of its pixels, row by row."""

    name = "image-classification"
    title = "image classification"
    model = ImageClassifier
    data_forms: Mapping[str, str] = {"images": "labelled"}
    reasons: Mapping[str, str] = {
        "causal": "every patch attends to all others",
        "incremental_decoding": "an image is classified as a whole",
        "cross_attention": "it reads one image only",
        "padding_invariant": "all images have one size, so there is no padding",
        "packing": "an image is not part of a row",
        "per_token": "an image has one label, its patches have none",
    }
    argument = "IMAGES"
    nouns = "images"

    def token_ids(self, model: ImageClassifier) -> int:
        return BRIGHTNESS_LEVELS

    def fixed_length(self, model: ImageClassifier) -> int:
        return math.prod(model.embed.shape)

    def example(self, model: ImageClassifier, tokens: Tensor) -> Inputs:
        """The tokens are repeated or cut to the size of an image."""
        length = self.fixed_length(model)
        # an image has one size, however many tokens a contract draws
        return Inputs(tokens.repeat(1, -(-length // tokens.shape[1]))[:, :length])

    def arguments(self, model: ImageClassifier, inputs: Inputs) -> tuple[Any, ...]:
        return (_images(model, inputs.tokens),)

    def batch(self, model: ImageClassifier, inputs: Inputs, targets: Tensor) -> ImageClassificationBatch:
        return ImageClassificationBatch(_images(model, inputs.tokens), targets)

    def toy(self, model: ImageClassifier, draw: ToyDraw) -> Toy:
        """Gray images with one dark and one bright patch; the label is whether the dark one comes first."""
        height, width, channels = model.embed.shape
        patch_size = model.embed.patch
        patches = (height // patch_size) * (width // patch_size)
        order = torch.rand(ROWS, patches, generator=draw.generator).argsort(dim=1)[:, :2]
        grid = torch.full((ROWS, patches), 128, dtype=torch.uint8)
        grid.scatter_(1, order[:, :1], 0).scatter_(1, order[:, 1:], 255)
        rows = grid.view(ROWS, height // patch_size, width // patch_size, 1)
        images = rows.repeat_interleave(patch_size, 1).repeat_interleave(patch_size, 2).expand(-1, -1, -1, channels)
        labels = (order[:, 0] < order[:, 1]).long()
        batch = ImageClassificationBatch(images.contiguous().to(draw.device), labels.to(draw.device))
        return Toy(batch, math.log(2))

    def read(self, model: ImageClassifier, batch: ImageClassificationBatch) -> tuple[Tensor, Tensor]:
        return model(batch.pixels).logits, batch.labels

    def image_pass(
        self, model: ImageClassifier, image: NDArray[np.uint8], tokenizer: ImageTokenizer | None
    ) -> ImagePass:
        return image_tokens(model.embed, image, model.device, model)


def image_tokens(
    embed: PatchEmbedding, image: NDArray[np.uint8], device: torch.device, run: Callable[..., object]
) -> ImagePass:
    """The pass of `run`, which is called with images and a `watch` callback, over the patches of an image.

    Raises UserError for an image of another size."""
    height, width, channels = embed.shape
    if image.shape != embed.shape:
        expected = f"{height} x {width} pixels with {channels} channels"
        raise UserError(f"an image of shape {image.shape} must have {expected}, as the model was built")
    pixels = torch.from_numpy(image)[None].to(device)
    size = embed.patch
    patches = [(row, column) for row in range(0, height, size) for column in range(0, width, size)]
    # a class token stands in front and covers no pixel
    leading = embed.tokens - len(patches)
    labels = ("class token",) * leading + tuple(f"{row // size}, {column // size}" for row, column in patches)
    tokens = TextPass(lambda watch: run(pixels, watch=watch), labels, len(labels))
    return ImagePass(tokens, (None,) * leading + tuple(patches), size)


def _images(model: ImageClassifier, tokens: Int[Tensor, "b l"]) -> UInt8[Tensor, "b height width channels"]:
    return tokens.view(-1, *model.embed.shape).to(torch.uint8)


@final
class AudioClassification(BatchLabelTask[AudioClassifier]):
    """Assigns one label to each recording; drawn tokens stand for frames."""

    name = "audio-classification"
    title = "classification of recordings"
    model = AudioClassifier
    data_forms: Mapping[str, str] = {"audio": "labelled"}
    reasons: Mapping[str, str] = {
        "causal": "a label may depend on the whole recording",
        "incremental_decoding": "a later frame may change the label, so nothing can be cached",
        "cross_attention": "it reads one recording only",
        "packing": "a row has one label, so it holds one recording",
        "per_token": "a row has one label, frames have none",
    }
    argument = "FILES"
    nouns = "recordings"

    def token_ids(self, model: AudioClassifier) -> int:
        return STAND_IN_IDS

    def arguments(self, model: AudioClassifier, inputs: Inputs) -> tuple[Any, ...]:
        return stand_in_vectors(torch.randn, model.embed.mels, inputs.tokens.device)(inputs.tokens), inputs.segments

    def batch(self, model: AudioClassifier, inputs: Inputs, targets: Tensor) -> AudioClassificationBatch:
        features, segments = self.arguments(model, inputs)
        return AudioClassificationBatch(features, targets, segments)

    def toy(self, model: AudioClassifier, draw: ToyDraw) -> Toy:
        """Eight sounds of four frames each with one 5 and one 6; the label is whether the 5 comes first."""
        tokens, labels = draw.ordered_marks()
        inputs = Inputs(tokens.repeat_interleave(FRAMES_PER_SYMBOL, 1))
        return Toy(self.batch(model, inputs, labels), math.log(2))

    def read(self, model: AudioClassifier, batch: AudioClassificationBatch) -> tuple[Tensor, Tensor]:
        return model(batch.features, batch.segments).logits, batch.labels


IMAGE_CLASSIFICATION = ImageClassification()
AUDIO_CLASSIFICATION = AudioClassification()
