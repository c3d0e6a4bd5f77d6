"""The input of models of several modalities: each part of an example as a sequence of vectors."""

from typing import final

import torch
from torch import nn

from manyformer.batches import ModalitiesBatch
from manyformer.core import MemorySequence
from manyformer.errors import UserError
from manyformer.models.source_embedding import SourceEmbedding


@final
class PartEmbedding(nn.Module):
    """Embeds the image, the sound and the text of examples, and adds a learned vector for the kind of part to each.

    `parts` has an embedding for each kind that the model reads. The sequences are those of the parts that a batch has;
    where a row does not have one of them, it is padding. Raises UserError for a batch with a part that the model does
    not read, or with none at all."""

    def __init__(self, dim: int, parts: dict[str, SourceEmbedding]) -> None:
        super().__init__()
        if not parts:
            raise UserError("a model of several modalities needs one at least of an image, sound and a text to read")
        self.parts = nn.ModuleDict(parts)
        self.kinds = nn.ParameterDict({name: nn.Parameter(torch.randn(dim) * dim**-0.5) for name in parts})

    def forward(self, batch: ModalitiesBatch) -> dict[str, MemorySequence]:
        """The sequences by the names of the parts, in the order image, sound, text."""
        given = {
            "image": (batch.images, batch.image_segments),
            "sound": (batch.frames, batch.frame_segments),
            "text": (batch.tokens, batch.token_segments),
        }
        sequences = {}
        for name, (source, segments) in given.items():
            if source is None:
                continue
            if name not in self.parts:
                raise UserError(f"this model reads {', '.join(self.parts)}, and is given the part {name}")
            embed: SourceEmbedding = self.parts[name]  # type: ignore[assignment]
            if segments is not None and embed.tokens is not None:
                segments = segments[:, None].expand(-1, embed.tokens)
            x, positions = embed.read_source(source, segments, batch.token_layout if name == "text" else None)
            sequences[name] = MemorySequence(x + self.kinds[name].to(x.dtype), positions)
        if not sequences:
            raise UserError(f"this model reads {', '.join(self.parts)}, and the batch has no part")
        return sequences
