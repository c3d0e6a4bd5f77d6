"""What the summary of a hidden part says, told apart from what others say: ETC's second objective."""

from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.batches import IGNORE_INDEX, MaskedLMBatch
from manyformer.core import PADDING_SEGMENT, Context, LayerOutput, PrefixedLayout, TokenPositions
from manyformer.masks.mask import part_of
from manyformer.mixers.global_summaries import SummaryPrefixedLayer
from manyformer.models.embedding import TokenEmbedding
from manyformer.models.token_positions import positions_of

MASK = 4
"""The number that hides a token; all tokenizers here have the same."""


@final
@dataclass(frozen=True)
class PartContrastiveLoss:
    """Contrastive predictive coding (Ainslie et al. 2020, arXiv:2004.08483, pre-training tasks).

    In documents of several parts, a part is hidden as a whole with probability `rate`, and at least two of the batch
    are. What its summary becomes in the document must be nearest to what the summary of that very part becomes when the
    same model reads it alone, among all hidden parts of the batch: cross entropy over their products, which are scaled
    like attention scores. It makes up `share` of the whole loss, where that of the hidden tokens makes up the rest.
    """

    share: float = 0.2
    rate: float = 0.1

    def __post_init__(self) -> None:
        if not (0 < self.share < 1 and 0 < self.rate < 1):
            raise ValueError(f"{self!r}: share and rate must lie between 0 and 1")

    # how many parts are hidden, and how long they are, is drawn anew each time
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(
        self, embed: TokenEmbedding, body: SummaryPrefixedLayer, batch: MaskedLMBatch, positions: TokenPositions
    ) -> tuple[LayerOutput, Tensor]:
        """The text with some parts hidden after `body`, and the loss, such that one of the targets counts as 1."""
        whole = body.place(positions, len(batch.tokens))
        assert isinstance(whole.layout, PrefixedLayout)
        front, end = whole.layout.prefix, whole.position_ids.shape[1]
        summaries, text = whole.columns(0, front), whole.columns(front, end)
        chosen = self._choose(summaries)
        own = (text.segment_ids[:, :, None] == summaries.segment_ids[:, None]) & (
            part_of(text)[:, :, None] == part_of(summaries)[:, None]
        )
        hidden = (own & chosen[:, None]).any(-1)
        found = body.both(embed(batch.tokens.masked_fill(hidden, MASK), positions), Context(positions))
        rows, numbers = chosen.nonzero(as_tuple=True)
        if not len(rows):
            return found.text, found.summaries.new_zeros(())
        original = torch.where(batch.targets == IGNORE_INDEX, batch.tokens, batch.targets)
        alone = _alone(embed, body, original[rows], own[rows, :, numbers])
        scores = found.summaries[chosen] @ alone.mT * alone.shape[-1] ** -0.5
        right = torch.arange(len(rows), device=scores.device)
        return found.text, F.cross_entropy(scores, right) * (self.share / (1 - self.share))

    def _choose(self, summaries: TokenPositions) -> Bool[Tensor, "b n"]:
        """The parts to hide; never the only one of a document, of which nothing else would tell."""
        several = (summaries.segment_ids[:, :, None] == summaries.segment_ids[:, None]).sum(-1) > 1
        several = several & (summaries.segment_ids != PADDING_SEGMENT)
        if not several.any():
            return several
        # documents of several parts have two at least
        drawn = torch.rand(summaries.segment_ids.shape, device=summaries.segment_ids.device)
        return several & (drawn <= drawn[several].kthvalue(2).values.clamp(min=self.rate))


def _alone(
    embed: TokenEmbedding, body: SummaryPrefixedLayer, tokens: Int[Tensor, "n l"], own: Bool[Tensor, "n l"]
) -> Float[Tensor, "n d"]:
    """The summaries of parts, each read as a document of this part."""
    order = (~own).long().argsort(dim=1, stable=True)[:, : int(own.sum(1).max())]
    tokens, real = tokens.gather(1, order), own.gather(1, order)
    place = positions_of(tokens, torch.where(real, 0, PADDING_SEGMENT), None)[0]
    place = place._replace(part_ids=torch.zeros_like(tokens))
    return body.both(embed(tokens, place), Context(place)).summaries[:, 0]
