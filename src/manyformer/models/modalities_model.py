"""Models of several modalities: each part of an example as a sequence, one label for all, or two towers that agree."""

import math
from abc import abstractmethod
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from manyformer.base.errors import UserError
from manyformer.models.embedding import SourceEmbedding
from manyformer.models.encoder_model import mean_over_tokens
from manyformer.models.head import BatchLoss, BatchScore, ClassHead, apply_head
from manyformer.models.model import Model, ModelOutput
from manyformer.nn.attention.modality_fusion import Fusion, has_tokens
from manyformer.nn.batches import IGNORE_INDEX, ModalitiesBatch
from manyformer.nn.core import Context, Layer, LayerOutput, MemorySequence, State, WatchFn, apply_layer, no_watch


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
        # a batch needs labels, which `output` does not read; without any part there is no row
        first_part = next(part for part in (images, frames, tokens, torch.zeros(0, 0)) if part is not None)
        labels = torch.zeros(first_part.shape[0], dtype=torch.long, device=first_part.device)
        batch = ModalitiesBatch(labels, images, frames, tokens, image_segments, frame_segments, token_segments)
        return self.output(batch, watch)

    @abstractmethod
    def output(self, batch: ModalitiesBatch, watch: WatchFn) -> ModelOutput:
        """The output for a batch, whose labels do not matter."""


@final
class MultimodalClassifier(ModalitiesModel):
    """Classifies examples by the mean of the parts that each has, a part being the mean of its tokens after fusion."""

    def __init__(self, embed: PartEmbedding, fusion: Fusion, head: ClassHead) -> None:
        super().__init__()
        self.embed = embed
        self.fusion = fusion
        self.head = head

    def output(self, batch: ModalitiesBatch, watch: WatchFn) -> ModelOutput:
        """The logits (b, classes) of examples."""
        hidden = self._pool(batch, watch)
        return ModelOutput(apply_head(self.head, hidden.y), None, hidden.loss)

    def head_inputs(self, batch: ModalitiesBatch, state: State) -> tuple[LayerOutput, Tensor]:
        return self._pool(batch, no_watch), batch.labels

    def _pool(self, batch: ModalitiesBatch, watch: WatchFn) -> LayerOutput:
        sequences = self.embed(batch)
        outputs = self.fusion(sequences, watch)
        # (parts, b, d), of which rows without a part have zeros that the mask leaves out of the mean
        means = torch.stack([mean_over_tokens(outputs[name].y, part.positions) for name, part in sequences.items()])
        present = torch.stack([has_tokens(part.positions) for part in sequences.values()])[..., None]
        pooled = (means * present).sum(0) / present.sum(0).clamp(min=1)
        loss: Tensor | float = sum((output.loss for output in outputs.values()), 0.0)
        return LayerOutput(pooled, None, loss)


INITIAL_SCALE = 1 / 0.07
MAX_SCALE = 100.0
"""The initial inverse temperature, and the largest one (Radford et al. 2021, section 2.5)."""


@final
class PairSimilarity(nn.Module):
    """Logits of pairs of vectors of length 1: their cosines, divided by a learned temperature (section 2.5)."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(math.log(INITIAL_SCALE)))

    def forward(self, first: Float[Tensor, "n e"], second: Float[Tensor, "m e"]) -> Float[Tensor, "n m"]:
        return self.scale * first @ second.mT

    @property
    def scale(self) -> Float[Tensor, ""]:
        """The inverse temperature, at most 100."""
        # learned as a logarithm, so that steps are relative and the scale stays positive
        return self.log_scale.exp().clamp(max=MAX_SCALE)


@final
class TwoTowers(ModalitiesModel):
    """Embeds the two parts of examples in one space, where those of an example are nearer than those of two.

    Radford et al. 2021, section 2.3 and figure 3: the cosines of all pairs of a batch, times a learned inverse
    temperature, are logits for both which second part belongs to a first one and vice versa. A tower is a layer, the
    mean of its tokens and a projection. The loss compares the rows that one process has in one batch."""

    def __init__(self, embed: PartEmbedding, towers: dict[str, Layer], dim: int, shared_dim: int) -> None:
        super().__init__()
        if len(towers) != 2 or embed.parts.keys() != towers.keys():
            raise UserError(f"two towers read two parts of an image, sound and a text, and these are {list(towers)}")
        self.embed = embed
        self.towers = nn.ModuleDict(towers)
        self.projections = nn.ModuleDict({name: nn.Linear(dim, shared_dim, bias=False) for name in towers})
        for projection in self.projections.values():
            nn.init.normal_(projection.weight, std=dim**-0.5)  # type: ignore[arg-type]
        self.similarity = PairSimilarity()

    def output(self, batch: ModalitiesBatch, watch: WatchFn) -> ModelOutput:
        """The embeddings of both parts (b, 2 e), times the root of the scale: their products are logits of pairs."""
        embedded = torch.cat(self.embeddings(batch, watch), -1)
        # both embeddings get the root: a product of two then has the whole scale
        return ModelOutput(embedded * self.similarity.scale.sqrt())

    def embeddings(
        self, batch: ModalitiesBatch, watch: WatchFn = no_watch
    ) -> tuple[Float[Tensor, "b e"], Float[Tensor, "b e"]]:
        """The embeddings of the first and the second part of each example, of length 1.

        Raises UserError for a batch without one of them."""
        sequences = self.embed(batch)
        if missing := [name for name in self.towers if name not in sequences]:
            raise UserError(f"this model compares {' and '.join(self.towers)}, and the batch has no {missing[0]}")
        first, second = (self._embed(name, sequences[name], watch) for name in self.towers)
        return first, second

    def loss(self, batch: ModalitiesBatch, *, label_smoothing: float = 0.0, state: State = None) -> BatchLoss:
        logits = self._logits(batch)
        total = pair_loss(logits, label_smoothing=label_smoothing)
        return BatchLoss(total, torch.full((), len(logits), device=logits.device))

    def score(self, batch: ModalitiesBatch, *, state: State = None) -> BatchScore:
        logits = self._logits(batch).float()
        count = torch.full((), len(logits), device=logits.device)
        if len(logits):
            # the partner of row i is column i
            correct = (logits.argmax(-1) == torch.arange(len(logits), device=logits.device)).sum()
        else:
            correct = count
        return BatchScore(pair_loss(logits).cpu().double(), count, correct)

    def _logits(self, batch: ModalitiesBatch) -> Float[Tensor, "n n"]:
        """The logits of all pairs of rows that are not ignored."""
        first, second = self.embeddings(batch)
        if batch.scored is None:
            is_scored = batch.labels != IGNORE_INDEX
            first = first[is_scored]
            second = second[is_scored]
        else:
            # places that the batch knows, so that a GPU need not be asked how many rows are scored
            first, second = (part.index_select(0, batch.scored) for part in (first, second))
        logits: Tensor = self.similarity(first, second)
        return logits

    def _embed(self, name: str, sequence: MemorySequence, watch: WatchFn) -> Float[Tensor, "b e"]:
        tower: Layer = self.towers[name]  # type: ignore[assignment]
        y = apply_layer(tower, sequence.y, Context(sequence.positions, watch=watch)).y
        return F.normalize(self.projections[name](mean_over_tokens(y, sequence.positions)), dim=-1)


def pair_loss(logits: Float[Tensor, "n n"], *, label_smoothing: float = 0.0) -> Float[Tensor, ""]:
    """The sum over pairs of the mean of both cross entropies: of the columns of a row, and of the rows of a column."""
    targets = torch.arange(len(logits), device=logits.device)
    directions = (
        F.cross_entropy(part, targets, reduction="sum", label_smoothing=label_smoothing) for part in (logits, logits.mT)
    )
    return sum(directions, logits.new_zeros(())) / 2
