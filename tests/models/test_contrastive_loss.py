"""Contrastive predictive coding: which parts are hidden, what is compared with what, and that it can be learnt."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import manyformer as mf
from manyformer.models import MaskedLM
from manyformer.models.embedding import positions_of
from manyformer.models.masked_lm import DRAWN_MASK_ID, PartContrastiveLoss
from manyformer.nn.batches import IGNORE_INDEX, MaskedLMBatch
from manyformer.nn.core import PADDING_SEGMENT, Context

SMALL = {
    "vocab": 23,
    "dim": 16,
    "heads": 2,
    "depth": 2,
    "ff_dim": 24,
    "dropout": 0.0,
    "window": 3,
    "part_length": 4,
    "max_relative_distance": 2,
}


def built(**words: Any) -> Any:
    return mf.build("etc", **SMALL, **words).double()


def chosen_all_but(model: Any, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide every part from number `first` on."""
    real = torch.rand

    def drawn(*shape: Any, **words: Any) -> Tensor:
        actual = real(*shape, **words)
        return torch.where(torch.arange(actual.shape[-1]) < first, 1.0, 0.0).expand(actual.shape)

    monkeypatch.setattr(torch, "rand", drawn)


@pytest.mark.parametrize("mask", [DRAWN_MASK_ID, 22])
def test_what_is_hidden_and_what_is_compared(monkeypatch: pytest.MonkeyPatch, mask: int) -> None:
    model = built(contrast_weight=0.25).train()
    tokens = torch.randint(5, 23, (2, 10))
    segments = torch.tensor([[0] * 10, [0] * 6 + [PADDING_SEGMENT] * 4])
    targets = torch.full_like(tokens, IGNORE_INDEX)
    targets[:, 1] = targets[0, 9] = 7
    chosen_all_but(model, 1, monkeypatch)
    ids = None if mask == DRAWN_MASK_ID else torch.full((2,), mask)
    actual = model.loss(MaskedLMBatch(tokens, targets, segments, mask=ids))
    hidden = tokens.clone()
    hidden[0, 4:], hidden[1, 4:6] = mask, mask
    place = positions_of(tokens, segments, None)[0]
    full = model.body.summaries_and_text(model.embed(hidden, place), Context(place))
    expected = F.cross_entropy(model.head(full.text.y).flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(actual.total, expected)
    # the originals where tokens were replaced, one part at a time
    original = torch.where(targets == IGNORE_INDEX, tokens, targets)
    alone = []
    for part in (original[:1, 4:8], original[:1, 8:10], original[1:, 4:6]):
        at = positions_of(part, None, None)[0]
        alone.append(model.body.summaries_and_text(model.embed(part, at), Context(at)).summaries[0, 0])
    inside = torch.stack([full.summaries[0, 1], full.summaries[0, 2], full.summaries[1, 1]])
    scores = inside @ torch.stack(alone).T / 16**0.5
    apart = F.cross_entropy(scores, torch.arange(3)) * (0.25 / 0.75)
    torch.testing.assert_close(actual.extra, apart)


def test_a_single_part_is_never_hidden_and_nothing_is_while_scoring() -> None:
    model = built()
    model.contrast = replace(model.contrast, mask_rate=0.99)
    tokens = torch.randint(5, 23, (3, 4))
    batch = MaskedLMBatch(tokens, tokens)
    assert model.train().loss(batch).extra == 0
    longer = MaskedLMBatch(tokens.repeat(1, 3), tokens.repeat(1, 3))
    assert model.loss(longer).extra > 0
    model.contrast = replace(model.contrast, mask_rate=1e-9)
    # two at least, or there would be nothing to tell apart
    assert model.loss(longer).extra > 0
    assert model.eval().loss(longer).extra > 0
    expected = F.cross_entropy(model(longer.tokens).logits.flatten(0, 1), longer.targets.flatten(), reduction="sum")
    torch.testing.assert_close(model.loss(longer).total, expected)


def test_it_can_be_left_out_and_needs_parts() -> None:
    assert built(contrast_weight=None).contrast is None
    bert: Any = mf.build("bert", vocab=9, dim=8, heads=2, depth=1)
    with pytest.raises(ValueError, match="needs summaries of parts, and a Chain has none"):
        MaskedLM(bert.embed, bert.body, bert.head, contrast=PartContrastiveLoss())
    with pytest.raises(ValueError, match="loss_fraction and mask_rate must lie between 0 and 1"):
        PartContrastiveLoss(loss_fraction=1.0)
    with pytest.raises(ValueError, match=r"contrast_weight: must be a number > 0 and < 1 or null, got 0\.0"):
        built(contrast_weight=0.0)
    with pytest.raises(ValueError, match="no other loss trains the summaries of the last layer"):
        built(contrast_weight=None, projections="separate")


def test_summaries_of_hidden_parts_can_be_told_apart() -> None:
    """Where each part says what the part before it says: copies within reach of a summary alone."""
    torch.manual_seed(1)
    model: Any = mf.build("etc", **(SMALL | {"depth": 1}))
    model.contrast = replace(model.contrast, mask_rate=0.3)
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(60):
        symbols = torch.randint(5, 23, (16, 1)).repeat(1, 12)
        loss = model.train().loss(MaskedLMBatch(symbols, symbols))
        optimiser.zero_grad()
        (loss.total / loss.targets + loss.extra).backward()
        optimiser.step()
        losses.append(float(loss.extra.detach()))
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
