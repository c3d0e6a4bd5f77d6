"""The second objective of an encoder-decoder of sound: labels by CTC from the output of its encoder."""

from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.batches import IGNORE_INDEX
from manyformer.core import PADDING_SEGMENT, MemorySequence
from manyformer.ops.ctc import BLANK, ctc_losses, needed_positions


@final
class EncoderCTC(nn.Module):
    """CTC of `vocab` labels over an encoder's output, with the share `weight` of the loss (Watanabe et al. 2017, II-C).

    The paper's loss is weight x CTC + (1 - weight) x cross entropy; here CTC is added to the cross entropy with
    weight / (1 - weight), the same up to a factor."""

    def __init__(self, dim: int, vocab: int, weight: float) -> None:
        super().__init__()
        self.head = nn.Linear(dim, vocab)
        self.weight = weight

    def extra_loss(
        self, memory: MemorySequence, target: Int[Tensor, "b t"], targets: Int[Tensor, "b t"]
    ) -> Float[Tensor, ""]:
        """What is added to the cross entropy per target; a text without an alignment only has a cross entropy."""
        scored = (targets != IGNORE_INDEX).sum(1)
        lengths = _lengths(memory)
        labels = target[:, 1:]
        counts = (scored - 1).clamp(min=0)
        is_alignable = (scored > 0) & (needed_positions(labels, counts) <= lengths)
        losses = ctc_losses(self.head(memory.y), lengths, labels, counts * is_alignable)
        total = torch.where(is_alignable, losses, 0.0).sum() / scored.sum().clamp(min=1)
        return self.weight / (1 - self.weight) * total

    def log_probability(self, memory: MemorySequence, labels: Sequence[int]) -> float:
        """The natural logarithm of the probability of the labels of one row; minus infinity without an alignment."""
        if BLANK in labels:
            return float("-inf")
        lengths = _lengths(memory)
        target = lengths.new_tensor([list(labels)])
        count = lengths.new_tensor([len(labels)])
        if bool((needed_positions(target, count) > lengths).any()):
            return float("-inf")
        return -ctc_losses(self.head(memory.y), lengths, target, count).item()


def _lengths(memory: MemorySequence) -> Int[Tensor, " b"]:
    valid = memory.positions.segment_ids != PADDING_SEGMENT
    return valid.expand(memory.y.shape[:2]).sum(1)
