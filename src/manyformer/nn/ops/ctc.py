"""Connectionist temporal classification: the loss over all alignments of a target, two ways of decoding, and edits."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.base.errors import UserError
from manyformer.nn.runtime.devices import device_kind

BLANK = 0
"""The class of a frame without a label; it is the padding id of tokenizers, which no target contains."""


class LabelSequence(NamedTuple):
    """The labels of a sequence without blanks, and the natural logarithm of its probability."""

    labels: tuple[int, ...]
    log_probability: float


def ctc_losses(
    logits: Float[Tensor, "b l v"], lengths: Int[Tensor, " b"], targets: Int[Tensor, "b t"], counts: Int[Tensor, " b"]
) -> Float[Tensor, " b"]:
    """-log p(target) of each row, summed over alignments of its first `counts` labels (Graves et al. 2006, section 4).

    An alignment gives each of the first `lengths` positions a label or `BLANK`; repeated labels are merged, then blanks
    removed. Raises UserError for a target that has no alignment: it needs a position for each label, and one for a
    blank between two equal ones."""
    # torch's loop over positions needs lengths and counts on the host: all numbers of rows are read together
    rows = torch.stack([lengths, counts, needed_positions(targets, counts)])
    row_lengths, row_counts, needed = rows.tolist()
    check_alignable(row_lengths, row_counts, needed)
    if logits.dtype != torch.float64:
        log_probs = logits.float().log_softmax(-1)
    else:
        log_probs = logits.log_softmax(-1)
    if not device_kind(logits.device).has_ctc_loss:
        log_probs = log_probs.cpu()
        targets = targets.cpu()
    losses: Tensor = F.ctc_loss(
        log_probs.transpose(0, 1), targets, row_lengths, row_counts, blank=BLANK, reduction="none"
    )
    return losses.to(logits.device)


def check_alignable(lengths: Sequence[int], counts: Sequence[int], needed: Sequence[int]) -> None:
    """Raise UserError for the first row whose target of `counts` labels needs more positions than it has."""
    for row, (length, count, positions) in enumerate(zip(lengths, counts, needed, strict=True)):
        if positions <= length:
            continue
        blanks = ""
        if positions > count:
            blanks = f" and {positions - count} blanks between equal neighbours"
        raise UserError(
            f"row {row} of the batch has {count} labels{blanks}, but only {length} positions of sound: no "
            f"alignment exists; its text is too long for the recording, or subsampling is too coarse"
        )


def needed_positions(targets: Int[Tensor, "b t"], counts: Int[Tensor, " b"]) -> Int[Tensor, " b"]:
    """The positions that the first `counts` labels need: one each, and one for a blank between two equal ones."""
    columns = torch.arange(targets.shape[1], device=targets.device)
    is_label: Bool[Tensor, "b t"] = columns < counts[:, None]
    repeats = (targets[:, 1:] == targets[:, :-1]) & is_label[:, 1:]
    return counts + repeats.sum(1)


def greedy_labels(logits: Float[Tensor, "b l v"], lengths: Int[Tensor, " b"]) -> list[tuple[int, ...]]:
    """The labels of the most likely alignment of each row (Graves et al. 2006, section 3.2)."""
    # repeated labels are merged first, then blanks go: a blank between two equal labels keeps both
    best = logits.argmax(-1)
    is_new = torch.ones_like(best, dtype=torch.bool)
    is_new[:, 1:] = best[:, 1:] != best[:, :-1]
    is_position = torch.arange(best.shape[1], device=best.device) < lengths[:, None]
    selected = is_new & is_position & (best != BLANK)
    return [tuple(row[mask].tolist()) for row, mask in zip(best, selected)]


class _PrefixScore(NamedTuple):
    """Log-probabilities that the alignments so far give a prefix, and end in a blank or in its last label."""

    blank: float = -math.inf
    label: float = -math.inf

    @property
    def total(self) -> float:
        return _log_add(self.blank, self.label)


def prefix_beam_search(
    log_probs: Float[Tensor, "l v"], width: int, *, min_log_probability: float = -math.inf
) -> list[LabelSequence]:
    """The `width` most likely sequences of labels, best first (Hannun et al. 2014, arXiv:1408.2873, algorithm 1).

    Unlike the most likely alignment, the probability of a sequence sums over its alignments; the search is exact if no
    more than `width` prefixes exist. Labels below `min_log_probability` at a position are not added there, which saves
    time. Raises UserError for a width below 1."""
    if width < 1:
        raise UserError(f"the width of a beam ({width}) must be 1 or more")
    beam: dict[tuple[int, ...], _PrefixScore] = {(): _PrefixScore(blank=0.0)}
    for row in log_probs.tolist():
        candidates = [
            (label, score) for label, score in enumerate(row) if label != BLANK and score >= min_log_probability
        ]
        scores: defaultdict[tuple[int, ...], _PrefixScore] = defaultdict(_PrefixScore)
        for prefix, (blank, label_score) in beam.items():
            total = _log_add(blank, label_score)
            last = prefix[-1] if prefix else BLANK
            # the same label again, without a blank in between, adds nothing to the prefix
            repeated = label_score + row[last] if prefix else -math.inf
            _add(scores, prefix, blank=total + row[BLANK], label=repeated)
            for label, score in candidates:
                # an equal label only begins anew after a blank
                _add(scores, (*prefix, label), label=(blank if label == last else total) + score)
        # an equal label without a blank before it has no alignment
        possible = [item for item in scores.items() if item[1].total > -math.inf]
        beam = dict(sorted(possible, key=lambda item: item[1].total, reverse=True)[:width])
    return [LabelSequence(labels, score.total) for labels, score in beam.items()]


def _add(
    scores: defaultdict[tuple[int, ...], _PrefixScore],
    prefix: tuple[int, ...],
    *,
    blank: float = -math.inf,
    label: float = -math.inf,
) -> None:
    score = scores[prefix]
    scores[prefix] = _PrefixScore(_log_add(score.blank, blank), _log_add(score.label, label))


def _log_add(a: float, b: float) -> float:
    """log(exp(a) + exp(b))."""
    high = max(a, b)
    low = min(a, b)
    if low == -math.inf:
        return high
    return high + math.log1p(math.exp(low - high))


def edit_distance(sequence: Sequence[object], reference: Sequence[object]) -> int:
    """The least number of items to insert, delete or replace to turn one into the other (Levenshtein 1966)."""
    distances = list(range(len(reference) + 1))
    for row, item in enumerate(sequence, 1):
        diagonal = distances[0]
        distances[0] = row
        for column, other in enumerate(reference, 1):
            replaced = diagonal + (item != other)
            diagonal = distances[column]
            distances[column] = min(replaced, diagonal + 1, distances[column - 1] + 1)
    return distances[-1]
