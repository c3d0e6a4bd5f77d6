"""The common part of tasks of examples of several parts, which token ids stand for in contracts and measurements."""

import math
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from typing_extensions import TypeVar

from manyformer.batches import ModalitiesBatch
from manyformer.core import PADDING_SEGMENT
from manyformer.models import PatchEmbedding
from manyformer.models.frame_embedding import FrameEmbedding
from manyformer.models.modalities_model import MultimodalClassifier, PartEmbedding, TwoTowers
from manyformer.tasks.stand_in_vectors import STAND_IN_IDS, stand_in_vectors
from manyformer.tasks.task import Inputs, Task
from manyformer.torch_internals import compiler_disabled

PartsModelT = TypeVar("PartsModelT", bound=MultimodalClassifier | TwoTowers, default=Any)
"""The model class of a task."""


class PartsTask(Task[PartsModelT]):
    """Reads examples of several parts; drawn tokens stand for them."""

    def token_ids(self, model: PartsModelT) -> int:
        return model.embed.parts["text"].vocab if "text" in model.embed.parts else STAND_IN_IDS  # type: ignore[return-value]

    def arguments(self, model: PartsModelT, inputs: Inputs) -> tuple[Any, ...]:
        return self.batch(model, inputs, torch.zeros(len(inputs.tokens), dtype=torch.long)).inputs

    def batch(self, model: PartsModelT, inputs: Inputs, targets: Tensor) -> ModalitiesBatch:
        batch: ModalitiesBatch = batch_of_tokens(model.embed, inputs, targets)
        return batch


@compiler_disabled
def batch_of_tokens(embed: PartEmbedding, inputs: Inputs, labels: Int[Tensor, " b"]) -> ModalitiesBatch:
    """The examples that rows of tokens stand for: each is a frame and a word, and the first one an image.

    Padding is that of the tokens; a row of padding alone has no part."""
    tokens = inputs.tokens
    parts = embed.parts
    segments = inputs.segments
    if segments is None:
        is_token = torch.ones_like(tokens, dtype=torch.bool)
    else:
        is_token = segments != PADDING_SEGMENT
    batch = ModalitiesBatch(labels)
    if "image" in parts:
        patches: PatchEmbedding = parts["image"]  # type: ignore[assignment]
        if tokens.shape[1]:
            index = is_token.long().argmax(1, keepdim=True)
        else:
            index = tokens
        if tokens.shape[1]:
            first = tokens.gather(1, index)[:, 0]
        else:
            first = tokens.new_zeros(len(tokens))
        pixels = stand_in_vectors(torch.rand, math.prod(patches.shape), tokens.device)(first % STAND_IN_IDS)
        images = (pixels.view(-1, *patches.shape) * 255).to(torch.uint8)
        batch = batch._replace(images=images, image_segments=torch.where(is_token.any(1), 0, PADDING_SEGMENT))
    if "sound" in parts:
        frames: FrameEmbedding = parts["sound"]  # type: ignore[assignment]
        batch = batch._replace(
            frames=stand_in_vectors(torch.rand, frames.mels, tokens.device)(tokens % STAND_IN_IDS),
            frame_segments=segments,
        )
    if "text" in parts:
        return batch._replace(tokens=tokens, token_segments=segments)
    return batch
