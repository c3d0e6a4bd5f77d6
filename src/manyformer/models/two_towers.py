"""Two towers that are trained to agree on pairs, such as images and their descriptions."""

import math
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.batches import IGNORE_INDEX, ModalitiesBatch
from manyformer.core import Context, Layer, MemorySequence, State, WatchFn, apply_layer, no_watch
from manyformer.errors import UserError
from manyformer.models.classifier import mean_over_tokens
from manyformer.models.head import BatchLoss, BatchScore
from manyformer.models.modalities_model import ModalitiesModel
from manyformer.models.model import ModelOutput
from manyformer.models.part_embedding import PartEmbedding

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
