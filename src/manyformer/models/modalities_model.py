"""The base class of models of several modalities, which are called with the parts of examples."""

from abc import abstractmethod

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from manyformer.batches import ModalitiesBatch
from manyformer.core import WatchFn, no_watch
from manyformer.models.model import Model, ModelOutput


class ModalitiesModel(Model[ModalitiesBatch]):
    """Reads the image, the frames of sound and the text of each example; subclasses define what of these."""

    def forward(
        self,
        images: UInt8[Tensor, "b height width channels"] | None = None,
        frames: Float[Tensor, "b f m"] | None = None,
        tokens: Int[Tensor, "b t"] | None = None,
        image_segments: Int[Tensor, " b"] | None = None,
        frame_segments: Int[Tensor, "b f"] | None = None,
        token_segments: Int[Tensor, "b t"] | None = None,
        *,
        watch: WatchFn = no_watch,
    ) -> ModelOutput:
        """What `output` makes of examples, of whose parts one at least is given; segments of -1 are padding."""
        first_part = next(part for part in (images, frames, tokens, torch.zeros(0, 0)) if part is not None)
        labels = torch.zeros(len(first_part), dtype=torch.long, device=first_part.device)
        batch = ModalitiesBatch(labels, images, frames, tokens, image_segments, frame_segments, token_segments)
        return self.output(batch, watch)

    @abstractmethod
    def output(self, batch: ModalitiesBatch, watch: WatchFn) -> ModelOutput:
        """The output for a batch, whose labels do not matter."""
