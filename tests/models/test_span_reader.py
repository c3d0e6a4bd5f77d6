"""The loss of a reader of spans against its definition, and what it refuses."""

import pytest
import torch

from manyformer.analysis.own_models import build_tiny
from manyformer.base.errors import UserError
from manyformer.models import SpanReader
from manyformer.nn.batches import IGNORE_INDEX, AnswerSpanBatch

SEGMENTS = torch.tensor([[0, 0, 0, 0, 0, 0], [0, 0, 0, 0, -1, -1]])
TOKENS = torch.tensor([[1, 5, 6, 7, 8, 2], [1, 9, 8, 2, 0, 0]])


def reader(recipe: str) -> SpanReader:
    model = build_tiny(recipe, {"head": "answer-spans"}, 0).eval()
    assert isinstance(model, SpanReader)
    return model


def test_the_loss_is_that_of_both_ends_among_the_tokens_of_the_row() -> None:
    model, ends = reader("longformer"), torch.tensor([[2, 3], [0, IGNORE_INDEX]])
    batch = AnswerSpanBatch(TOKENS, ends, SEGMENTS, (TOKENS == 5).long())
    expected = torch.tensor(0.0)
    for row, length in enumerate((6, 4)):
        logits = model(TOKENS[row : row + 1, :length], None, batch.roles[row : row + 1, :length]).logits[0]  # type: ignore[index]
        for side in range(2):
            if ends[row, side] != IGNORE_INDEX:
                expected = expected - logits[:, side].log_softmax(0)[ends[row, side]]
    loss, score = model.loss(batch), model.score(batch)
    torch.testing.assert_close(loss.total, expected)
    torch.testing.assert_close(score.nll.float(), expected)
    assert int(loss.targets) == int(score.targets) == batch.target_count() == 3
    assert batch.token_count() == 10
    loss.total.backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.head.parameters())


def test_global_tokens_are_seen_from_everywhere() -> None:
    """A question far outside of the window reaches the last token in one layer only if it is global."""
    model = build_tiny("longformer", {"head": "answer-spans", "depth": 1, "window": 2, "global_tokens": None}, 0).eval()
    tokens = torch.randint(5, 29, (1, 20), generator=torch.Generator().manual_seed(0))
    other = tokens.clone()
    other[0, 1] = 5 + (tokens[0, 1] - 4) % 24
    for roles, differs in ((None, False), (torch.tensor([[0, 1] + [0] * 18]), True)):
        change = (model(tokens, None, roles).logits - model(other, None, roles).logits)[0, -1].detach().abs().max()
        assert (float(change) > 1e-6) is differs


def test_label_smoothing_is_refused() -> None:
    model = reader("bert")
    with pytest.raises(UserError, match="the ends of an answer are tokens"):
        model.loss(AnswerSpanBatch(TOKENS, torch.zeros(2, 2, dtype=torch.long)), label_smoothing=0.1)
