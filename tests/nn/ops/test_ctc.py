"""Connectionist temporal classification against sums over all alignments."""

import itertools
import math
from collections import defaultdict

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.base.errors import UserError
from manyformer.nn.ops.ctc import BLANK, ctc_losses, edit_distance, greedy_labels, prefix_beam_search


def merged(alignment: tuple[int, ...]) -> tuple[int, ...]:
    """The labels of an alignment: repeated ones merged, then blanks removed."""
    return tuple(label for label, _ in itertools.groupby(alignment) if label != BLANK)


def label_probabilities(log_probs: Float[Tensor, "l v"]) -> dict[tuple[int, ...], Tensor]:
    """The probability of each sequence of labels: the sum over its alignments, one by one."""
    sums: defaultdict[tuple[int, ...], Tensor] = defaultdict(lambda: torch.zeros((), dtype=log_probs.dtype))
    for alignment in itertools.product(range(log_probs.shape[1]), repeat=len(log_probs)):
        probability = log_probs[torch.arange(len(log_probs)), torch.tensor(alignment)].sum().exp()
        sums[merged(alignment)] = sums[merged(alignment)] + probability
    return sums


def draw_logits(rows: int = 3, length: int = 4, classes: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return 2 * torch.randn(rows, length, classes, generator=generator, dtype=torch.float64)


def test_the_loss_sums_over_alignments_and_so_does_its_gradient() -> None:
    logits = draw_logits().requires_grad_()
    targets, counts = torch.tensor([[1, 2], [1, 1], [2, 0]]), torch.tensor([2, 2, 1])
    lengths = torch.tensor([4, 3, 2])
    losses = ctc_losses(logits, lengths, targets, counts)
    expected = torch.stack(
        [
            -label_probabilities(row[:length].log_softmax(-1))[tuple(target[:count].tolist())].log()
            for row, length, target, count in zip(logits, lengths.tolist(), targets, counts.tolist())
        ]
    )
    torch.testing.assert_close(losses, expected)
    weights = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    (actual_gradient,) = torch.autograd.grad(losses @ weights, logits)
    (expected_gradient,) = torch.autograd.grad(expected @ weights, logits)
    torch.testing.assert_close(actual_gradient, expected_gradient)


@pytest.mark.parametrize(
    ("target", "needed"), [([1, 2, 1, 2, 1], "5 labels, but"), ([1, 1, 2, 1], "4 labels and 1 blanks")]
)
def test_a_target_without_an_alignment_is_named(target: list[int], needed: str) -> None:
    logits, targets = draw_logits(rows=2), torch.tensor([[1] + [0] * (len(target) - 1), target])
    with pytest.raises(UserError, match=f"row 1 of the batch has {needed}.*only 4 positions"):
        ctc_losses(logits, torch.tensor([4, 4]), targets, torch.tensor([1, len(target)]))


def test_a_target_that_just_fits_has_the_loss_of_its_only_alignment() -> None:
    logits = draw_logits(rows=1)
    losses = ctc_losses(logits, torch.tensor([4]), torch.tensor([[1, 2, 2]]), torch.tensor([3]))
    # a blank between the two equal labels is all that fits into 4 positions
    path = logits[0].log_softmax(-1)[torch.arange(4), torch.tensor([1, 2, 0, 2])]
    torch.testing.assert_close(losses, -path.sum()[None])


def test_greedy_labels_are_those_of_the_best_alignment() -> None:
    logits = draw_logits(rows=8, length=6)
    lengths = torch.tensor([6, 5, 4, 3, 2, 1, 0, 6])
    expected = [merged(tuple(row[:count].argmax(-1).tolist())) for row, count in zip(logits, lengths.tolist())]
    assert greedy_labels(logits, lengths) == expected
    assert len(set(expected)) > 3


def test_a_wide_beam_ranks_sequences_as_the_sums_over_alignments_do() -> None:
    for row in draw_logits(length=5).log_softmax(-1):
        ranked = prefix_beam_search(row, 500)
        expected = sorted(label_probabilities(row).items(), key=lambda item: -float(item[1]))
        assert [item.labels for item in ranked] == [labels for labels, _ in expected]
        actual = torch.tensor([item.log_probability for item in ranked]).exp()
        torch.testing.assert_close(actual.double(), torch.stack([value for _, value in expected]))


def test_the_most_likely_sequence_is_not_that_of_the_best_alignment() -> None:
    log_probs = torch.tensor([[0.6, 0.4], [0.6, 0.4]], dtype=torch.float64).log()
    assert greedy_labels(log_probs[None], torch.tensor([2])) == [()]
    best = prefix_beam_search(log_probs, 4)[0]
    assert best.labels == (1,)
    assert math.exp(best.log_probability) == pytest.approx(1 - 0.36)
    with pytest.raises(UserError, match=r"\(0\) must be 1 or more"):
        prefix_beam_search(log_probs, 0)


@pytest.mark.parametrize(
    ("text", "reference", "edits"), [("kitten", "sitting", 3), ("", "abc", 3), ("abc", "", 3), ("flaw", "lawn", 2)]
)
def test_edit_distance(text: str, reference: str, edits: int) -> None:
    assert edit_distance(text, reference) == edits == edit_distance(reference, text)
